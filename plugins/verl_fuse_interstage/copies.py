"""Counts the memory of the copies of a slice's models, from the training ranks' reports on the models.

Invariants (tests/unit/interstage/test_inference_memory.py, test_megatron_memory.py):
- FSDP: a copy is in the dtype computed in, sharded over the slice's devices, built whole first, in the dtype it is
  trained in;
- Megatron: a copy is in the dtype trained in, has the tensor parallelism of its model and as many stages as divide the
  slice's devices and the stages of every model, and all experts; each device builds its own part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_fuse.spec.composed import ACTOR, CRITIC, REFERENCE, Get
from verl_fuse.spec.layout import copied_pipeline
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.step import Stage

# Stage -> the model that is trained with the same parameters, the engine's block and the FSDP block in it, and its
# dtype where the configuration has none.
_COPIES: Mapping[Stage, tuple[str, str, str, str]] = {
    "old_log_prob": ("actor", ACTOR, "fsdp_config", "fp32"),
    "ref": ("actor", REFERENCE, "fsdp_config", "bf16"),
    "values": ("critic", CRITIC, "fsdp", "fp32"),
}
# The weights of these stages' copies pass through the object store: the reference's copy reads its own.
_TRAINED: tuple[Stage, ...] = ("old_log_prob", "values")


@dataclass(frozen=True)
class Copy:
    """The copy of one model, by device of a slice: bytes of each tensor there (`tensors`), and of all host memory,
    including FSDP1's beside the tensors (`in_host`). Building it takes `building` bytes of host memory more, and a
    step's weights `stored` of Ray's object store."""

    tensors: Sequence[Sequence[int]]
    in_host: Sequence[int]
    building: int
    stored: int


def copy_of(get: Get, stage: Stage, devices: int, trained: Mapping[str, Sequence[RankMemory]]) -> Copy:
    """Return the copy that computes `stage` on a slice of so many devices; `trained` holds the reports of each model's
    ranks."""
    model, engine, block, default = _COPIES[stage]
    ranks = trained[model]
    if ranks[0].stage is not None:
        return _megatron(get, stage, engine, devices, trained)
    key = f"{engine}.{block}"
    kept, computed = get(f"{key}.model_dtype") or default, get(f"{key}.mixed_precision.param_dtype") or "bf16"
    width = min(_bytes(computed), _bytes(kept))
    size = get(f"{key}.fsdp_size") or -1
    shards = size if 0 < size < devices else devices
    parameters = ranks[0].parameters
    tensors = [math.ceil(elements / shards) * width for elements in parameters]
    in_host = _kept(tensors, ranks) * (2 if get(f"{engine}.strategy") == "fsdp" else 1)
    stored = sum(parameters) * width if stage in _TRAINED else 0
    building = sum(parameters) * _bytes(kept)
    return Copy([tensors] * devices, [in_host] * devices, building, stored)


def _megatron(get: Get, stage: Stage, engine: str, devices: int, trained: Mapping[str, Sequence[RankMemory]]) -> Copy:
    ranks = trained[_COPIES[stage][0]]
    # One rank's report stands for all ranks of its stage.
    stages = {rank.stage: rank for rank in reversed(ranks)}
    tensor = get(f"{engine}.megatron.tensor_model_parallel_size") or 1
    trained_stages = [len({rank.stage for rank in of}) for of in trained.values()]
    pipeline = copied_pipeline(devices, tensor, trained_stages)
    width, each = _bytes(get(f"{engine}.megatron.dtype") or "bfloat16"), len(stages) // pipeline
    tensors = []
    for number in range(pipeline):
        own = [stages[place] for place in range(number * each, (number + 1) * each)]
        elements = [count for rank in own for count in rank.parameters]
        # In one stage embedding and tied head are one tensor.
        elements += [own[-1].second_head] if pipeline > 1 and own[-1].second_head else []
        tensors.append([count * width for count in elements])
    # Stages are outermost in Megatron's order of ranks.
    by_device = [tensors[device * pipeline // devices] for device in range(devices)]
    stored = sum(rank.left for rank in ranks) if stage in _TRAINED else 0
    return Copy(by_device, [_kept(parts, ranks) for parts in by_device], 0, stored)


def _kept(tensors: Sequence[int], ranks: Sequence[RankMemory]) -> int:
    """Return the host memory of these tensors: torch pins a power of two for each, where the device is not the host."""
    if ranks[0].device is None:
        return sum(tensors)
    return sum(1 << (size - 1).bit_length() for size in tensors if size)


def _bytes(dtype: object) -> int:
    """Return the bytes by verl's names of dtypes (verl/utils/torch_dtypes.py): 16 bits in any spelling, else 32."""
    return 2 if "16" in str(dtype) or dtype == "half" else 4
