"""verl-fuse makes RL steps on stock verl shorter and cheaper, and keeps them strictly on-policy."""

__version__ = "0.1.0"
