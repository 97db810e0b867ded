"""Chooses the complete groups that a released lane should train on next. Pure: values in, keys out.

Invariants (tests/unit/update/test_streaming.py):
- only whole groups are handed out, in the order in which they were complete;
- a call takes at most `MICRO_BATCHES` micro-batches of each rank, but one group at least: the replica that generates
  last waits for the end of a call;
- no call waits behind the one that runs: all devices would wait for both once generation has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from verl_fuse.spec.composed import ACTOR, Get
from verl_fuse.spec.step import LaneView, RolloutView

MICRO_BATCHES = 2


@dataclass(frozen=True)
class CallSize:
    """The size that one call has at most: so many `samples`, or `tokens`; None: any number of them."""

    samples: int | None
    tokens: int | None


def call_size(get: Get, devices: int) -> CallSize:
    """Return the size of a call by the micro-batches of a run, on the `devices` of a replica."""
    if get(f"{ACTOR}.use_dynamic_bsz"):
        return CallSize(None, MICRO_BATCHES * devices * int(get(f"{ACTOR}.ppo_max_token_len_per_gpu")))
    return CallSize(MICRO_BATCHES * devices * int(get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1), None)


def next_groups(view: RolloutView, lane: LaneView, most: CallSize) -> Sequence[str] | None:
    """Return the keys of the next call on this lane, or None."""
    if not lane.released or lane.queued:
        return None
    groups: dict[str, list[str]] = {}
    tokens: dict[str, int] = {}
    for sample in view.complete:
        groups.setdefault(sample.group, []).append(sample.key)
        tokens[sample.group] = tokens.get(sample.group, 0) + sample.seq_len
    keys: list[str] = []
    amount = 0
    for group, members in groups.items():
        amount += tokens[group]
        full = most.samples is not None and len(keys) + len(members) > most.samples
        if keys and (full or (most.tokens is not None and amount > most.tokens)):
            break
        keys += members
    return keys or None
