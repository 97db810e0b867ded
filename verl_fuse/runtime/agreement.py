"""Compares the programs of all ranks before a program starts.

Invariants (tests/unit/runtime/test_agreement.py):
- ranks whose programs differ in any row are told which ranks differ and in which rows;
- the two ends of a connection that expect different shapes or types are both named, with the connection.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from verl_fuse.runtime.blame import Verdict


@dataclass(frozen=True, slots=True)
class Offer:
    """A rank's program by digests of its rows, and digests of the messages of each connection ("0F 1>2") that ends at
    the rank."""

    rows: tuple[str, ...]
    connections: Mapping[str, str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Offer":
        data = json.loads(text)
        return cls(tuple(data["rows"]), data["connections"])


def disagreement(offers: Mapping[int, Offer]) -> Verdict | None:
    """Return the fault in the offers of all ranks, or None; the same on every rank."""
    return _programs(offers) or _connections(offers)


def _programs(offers: Mapping[int, Offer]) -> Verdict | None:
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, offer in offers.items():
        groups.setdefault(offer.rows, []).append(rank)
    if len(groups) == 1:
        return None
    most, *others = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    # Without a majority no rank can be found wrong.
    accused = [ranks for _, ranks in others] + ([most[1]] if len(others[0][1]) == len(most[1]) else [])
    culprits = sorted(rank for ranks in accused for rank in ranks)
    length = max(len(rows) for rows in groups)
    padded = [(*rows, *[""] * (length - len(rows))) for rows in groups]
    differing = [row for row in range(length) if len({rows[row] for rows in padded}) > 1]
    parts = " against ".join(_ranks(ranks) for ranks in groups.values())
    return Verdict(tuple(culprits), f"op lists differ: {parts}, in the op list of {_ranks(differing)}")


def _connections(offers: Mapping[int, Offer]) -> Verdict | None:
    ends: dict[str, dict[int, str]] = {}
    for rank, offer in offers.items():
        for connection, digest in offer.connections.items():
            ends.setdefault(connection, {})[rank] = digest
    for connection, digests in sorted(ends.items()):
        if len(set(digests.values())) > 1:
            text = (
                f"{_ranks(sorted(digests))} expect different messages on connection {connection} (pipeline, kind, "
                "ranks)"
            )
            return Verdict(tuple(sorted(digests)), text)
    return None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
