"""Computes a prompt once for all samples of it that are in the same micro-batch."""
