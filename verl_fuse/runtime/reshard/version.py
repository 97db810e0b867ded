"""The version of the weights that a set of tensors holds.

Invariants (tests/unit/runtime/test_holding.py):
- from the first write of a transfer to its end on all ranks there is no version, and after a fault there is none:
  nobody can take a mixture for weights;
- `require` gives the version or raises; it never waits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from verl_fuse.errors import FuseError


class WeightVersion:
    """The version of one copy of a model's weights on one rank; None while they are written, and if that failed."""

    def __init__(self, name: str, version: int | None = None) -> None:
        self._name = name
        self._version = version

    @property
    def version(self) -> int | None:
        return self._version

    def require(self, version: int) -> None:
        """Whoever computes with these weights asks first; a FuseError if they are not of this version."""
        if self._version != version:
            held = (
                "are incomplete: a transfer was not finished"
                if self._version is None
                else f"are of version {self._version}"
            )
            raise FuseError(f"weights {self._name!r}: version {version} is needed, they {held}")

    @contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """The weights become those of `version` in this block; if it raises, they are nobody's."""
        self._version = None
        yield
        self._version = version
