"""Lossless speculation: the rollout's own history drafts, vLLM verifies, and what is sampled keeps its distribution."""
