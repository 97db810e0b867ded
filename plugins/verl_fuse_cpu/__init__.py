"""On the `cpu` platform stock verl trains on a host without an accelerator (see README.md)."""
