"""Lets the ranks of one shard group compute without the others.

verl agrees on numbers of tokens and micro-batches among all ranks, and torch's FSDP2 reduces gradients over all of
them. Within `alone` both stay in the shard group: gradients are reduced and scattered there after each micro-batch, and
FSDP2 adds up what has not been reduced over the groups.

Invariants (tests/integration/test_stream_engines.py):
- no rank outside the shard group is waited for, except in the last micro-batch of the last call, in which all take
  part;
- what is kept between calls is 4 bytes per parameter of the shard, in the dtype gradients are reduced in (float32).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# verl's name for the dimension of the mesh that parameters are cut over.
SHARDS = "fsdp"


@contextmanager
def alone(engine: Any, last: bool) -> Iterator[None]:
    """Let verl's FSDP2 `engine` compute in its shard group within the block; `last`: the last micro-batch reduces over
    all."""
    # Of the ranks that hold one copy of the parameters.
    group, module = engine.device_mesh[SHARDS].get_group(), engine.module

    @contextmanager
    def sync(*, is_last_micro_batch: bool) -> Iterator[None]:
        module.set_requires_gradient_sync(True)
        # After it: verl's own context turns both on together.
        module.set_requires_all_reduce(last and is_last_micro_batch)
        try:
            yield
        finally:
            module.set_requires_all_reduce(True)

    engine._gradient_sync_context, engine.get_data_parallel_group = sync, lambda: group
    try:
        yield
    finally:
        del engine._gradient_sync_context, engine.get_data_parallel_group


def forget(engine: Any) -> None:
    """Drop all gradients, including gradients that were not reduced over the groups; also after a failed backward pass.
    Every rank must do it."""
    # Without `reset_iter_state` partial sums would stay, without `zero_grad` sharded gradients would stay.
    engine.optimizer_zero_grad()
    # `_is_root` is None until the first forward pass, which builds the state that is reset.
    if engine.module._get_fsdp_state()._is_root is not None:
        engine.module.reset_iter_state()
