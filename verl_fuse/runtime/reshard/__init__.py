"""Runs transfer programs of `verl_fuse.reshard` on process groups."""
