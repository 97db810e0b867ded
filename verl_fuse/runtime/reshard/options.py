"""How transfers wait and check."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TransferOptions:
    """`timeout`: seconds a rank may wait for another; `checksums`: of every message."""

    timeout: float
    checksums: bool
