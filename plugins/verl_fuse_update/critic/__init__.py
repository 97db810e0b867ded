"""The critic's update with the values of its own forward pass."""
