"""What verl-fuse knows of verl, vLLM and TransferQueue beside the classes it extends."""
