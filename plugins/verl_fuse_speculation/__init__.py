"""Lossless speculation: the rollout's own history drafts, vLLM verifies, and the samples keep their distribution."""
