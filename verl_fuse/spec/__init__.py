"""Frozen data with a text or JSON form: what the rest of the library computes on. Imports numpy and PyYAML at most."""
