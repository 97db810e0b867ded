"""The A/B regression compares stock verl with verl-fuse installed but off, observing, and streaming."""

from ci.upstream.ab.command import main

__all__ = ["main"]
