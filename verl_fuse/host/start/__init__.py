"""Checks that are made before a run starts."""
