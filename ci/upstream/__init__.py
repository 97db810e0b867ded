"""Does verl-fuse still fit its upstream? `python -m ci.upstream COMMAND` tells (see README.md)."""
