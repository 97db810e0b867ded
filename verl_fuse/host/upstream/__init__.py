"""Holds knowledge of verl, vLLM and TransferQueue beside the classes that verl-fuse extends."""
