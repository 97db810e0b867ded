"""With inter-stage fusion finished samples go to inference while the long tail still generates (RLHFuse, arXiv
2409.13221)."""
