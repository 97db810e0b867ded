"""Holds the host's contracts with upstream. The package is light: it imports no module of upstream."""
