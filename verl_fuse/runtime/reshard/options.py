"""Defines the options of transfers: their waits and checks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TransferOptions:
    """`timeout`: seconds a rank may wait for another; `checksums`: every message has a checksum."""

    timeout: float
    checksums: bool
