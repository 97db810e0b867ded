"""Command lines of this package: bad usage ends with FAILED, because argparse's own exit code, 2, means red here."""

import argparse
import sys
from typing import NoReturn

# Beside what a command finds out (0 green, 1 yellow, 2 red): it could not be run at all.
FAILED = 3


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that exits with FAILED."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: {message}\n")
