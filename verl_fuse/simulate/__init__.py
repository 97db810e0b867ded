"""Predicts the time of a step: continuous batching with real lengths, strategies, whole steps. Imports neither torch
nor ray nor verl."""
