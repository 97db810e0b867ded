"""Moves weights: to replicas, to slices, between layouts."""
