"""Makes a verifiable task with long-tailed response lengths, small enough to learn on a CPU (see README.md)."""
