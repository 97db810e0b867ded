"""Counts the memory that a streamed update keeps on the devices of a replica, and the logits that an update keeps
beside its gradient, before the first step. Pure: values in, text out.

Invariants (tests/unit/update/test_streaming.py):
- a rank holds its shard of the parameters, two moments of the same size, a gradient, and the sum that waits, both of 4
  bytes per parameter; a slice on the same devices holds at least 2 bytes per parameter of each model that it copies;
- a run of which that alone is more than a device has is refused; on the host nothing is;
- of logits a run is told, never refused: how many activations are beside them is not known.
"""

from collections.abc import Sequence

from verl_fuse.spec.memory import RankMemory

# Adam's.
_MOMENTS = 2
# Bytes of one number that gradients are reduced in: float32; of one logit: bfloat16.
_REDUCED, _HALF = 4, 2
# The logits of a micro-batch, their gradient, and what a loss makes of them.
_KEPT = 3
_GIB = 2.0**30


def held_bytes(memory: RankMemory, devices: int, copies: int = 0) -> int:
    """Return the bytes on one of the `devices` of a replica, activations not counted; a slice there has so many
    `copies` of models."""
    elements = sum(memory.parameters)
    return (1 + _MOMENTS) * memory.shard + (2 * _REDUCED + copies * _HALF) * elements // devices


def stream_cost(ranks: Sequence[RankMemory], devices: int, copies: int = 0) -> str:
    """Return the message about memory that a run logs."""
    most = max(held_bytes(memory, devices, copies) for memory in ranks)
    return (
        f"fuse.update.stream=true: parameters, moments and gradients of the actor{_beside(copies)} take "
        f"{most / _GIB:.2f} GiB on each device whose replica is released, activations not counted; each replica of "
        f"{devices} devices has a copy"
    )


def logits_cost(ranks: Sequence[RankMemory], tokens: int) -> tuple[str, bool]:
    """Return the message about the logits of a micro-batch of so many tokens on a rank, and whether a device is too
    small for them beside the shard, its moments and its gradient."""
    said, small = "", False
    for memory in ranks:
        logits = _HALF * tokens * memory.outputs
        held = (2 + _MOMENTS) * memory.shard + _KEPT * logits
        if memory.device is not None and (not said or held > memory.device):
            small = held > memory.device
            said = (
                f"fuse.update.skip_old_log_prob=true: the logits of a micro-batch of {tokens} tokens take "
                f"{logits / _GIB:.1f} GiB, and the update keeps them beside their gradient; with parameters, moments "
                f"and gradients that is {held / _GIB:.1f} of {memory.device / _GIB:.1f} GiB"
            )
    return said, small


def does_not_fit(ranks: Sequence[RankMemory], devices: int, copies: int = 0) -> str | None:
    """Return the reason why a run is refused, or None."""
    for rank, memory in enumerate(ranks):
        held = held_bytes(memory, devices, copies)
        if memory.device is not None and held > memory.device:
            return (
                f"fuse.update.stream=true: {held / _GIB:.1f} GiB of parameters, moments and gradients{_beside(copies)} "
                f"do not fit on the device of rank {rank}, which has {memory.device / _GIB:.1f} GiB: rollout replicas "
                "of more devices, and a fsdp_size of as many, divide them"
            )
    return None


def _beside(copies: int) -> str:
    return f", and {copies} of a slice's models," if copies else ""
