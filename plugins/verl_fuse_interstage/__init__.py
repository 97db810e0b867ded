"""Inter-stage fusion: finished samples flow into inference while the long tail still generates (RLHFuse, arXiv
2409.13221)."""
