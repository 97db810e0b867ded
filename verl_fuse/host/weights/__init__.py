"""Weights on their way: to replicas, to slices, between layouts."""
