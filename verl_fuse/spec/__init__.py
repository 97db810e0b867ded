"""Frozen data with a text or JSON form: what the rest of the library computes on. Imports nothing but the standard library."""
