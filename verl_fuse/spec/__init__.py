"""Defines frozen data with a text or JSON form, on which the rest of the library computes. Imports numpy and PyYAML at
most."""
