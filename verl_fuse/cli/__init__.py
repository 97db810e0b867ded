"""The `verl-fuse` command: one module per subcommand, imported only when that subcommand runs."""

from verl_fuse.cli.main import main

__all__ = ["main"]
