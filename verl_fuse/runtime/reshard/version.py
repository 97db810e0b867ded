"""Tracks the version of the weights that a set of tensors holds.

Invariants (tests/unit/runtime/test_holding.py):
- from the first write of a transfer to its end on all ranks there is no version, and after a fault there is none:
  no code can take a mixture for weights;
- `require` gives the version or raises; it never waits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from verl_fuse.errors import FuseError


class WeightVersion:
    """The version of one copy of a model's weights on one rank; None while they are written, and after a write that
    failed."""

    def __init__(self, name: str, version: int | None = None) -> None:
        self._name = name
        self._version = version

    @property
    def version(self) -> int | None:
        return self._version

    def require(self, version: int) -> None:
        """Raise a FuseError unless the weights are of this version; code that computes with the weights calls this
        first."""
        if self._version != version:
            held = (
                "are incomplete: a transfer was not finished"
                if self._version is None
                else f"are of version {self._version}"
            )
            raise FuseError(f"weights {self._name!r}: version {version} is needed, they {held}")

    @contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Make the weights `version`'s in this block; if the block raises, the weights have no version."""
        self._version = None
        yield
        self._version = version
