"""verl-fuse: shorter, cheaper, strictly on-policy RL steps on stock verl."""

__version__ = "0.1.0"
