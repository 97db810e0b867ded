"""Holds the Hydra configuration shipped with verl-fuse (found through the search path plugin)."""
