"""Does verl-fuse still fit what is upstream? `python -m ci.upstream COMMAND` (see README.md)."""
