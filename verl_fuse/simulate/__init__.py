"""What a step would take: continuous batching with real lengths, strategies, whole steps. Imports neither torch nor ray
nor verl."""
