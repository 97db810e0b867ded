"""Parse the command lines of this package: bad usage ends with FAILED, because argparse's own exit code, 2, means red
here."""

import argparse
import sys
from typing import NoReturn

# The exit code of a command that could not run at all, beside its findings (0 green, 1 yellow, 2 red).
FAILED = 3


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that exits with FAILED."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: {message}\n")
