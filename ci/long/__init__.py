"""The tests that VERL_FUSE_LONG=1 adds, in parts of at most an hour: `make test-long` lists them."""
