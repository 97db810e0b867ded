"""Moves weights: to replicas, to slices."""
