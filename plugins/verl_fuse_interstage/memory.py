"""Tells whether inference has the memory that it needs, before anything is built. Pure: values in, sentences out.

Invariants (tests/unit/interstage/test_inference_memory.py):
- slices: a node keeps one copy of every model per slice in host memory (copies.py), and as much again of the copies
  that FSDP1 pins (gradients, which it never computes);
- slices: FSDP's copies are built one after the other; offloaded moments come later, and with them the weights of a
  step, of which Ray's object store holds one copy per node; more than the node has free is refused;
- slices: weights that the object store does not hold are a warning, because Ray writes them to disk then;
- slices: FSDP's copies that do not fit on a device beside the memory that training keeps there are a warning, because
  they stay in host memory then; Megatron's are refused;
- layout shared: a micro-batch that does not fit beside vLLM's share and the memory that training keeps is a warning;
- where the device is the host, its memory is counted once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verl_fuse.spec.composed import ACTOR, REFERENCE, ROLLOUT, Get, has_adapters
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.step import Stage
from verl_fuse_interstage.copies import copy_of

_POLICY: Mapping[Stage, str] = {"old_log_prob": ROLLOUT, "ref": REFERENCE}
# Logits in the dtype computed in, and once more in float32.
_LOGIT_BYTES = 6
_OFFLOAD = (
    f"{ACTOR}.fsdp_config.param_offload=true, {ACTOR}.fsdp_config.optimizer_offload=true and the critic's make room"
)
_OFFLOAD_MEGATRON = (
    f"{ACTOR}.megatron.param_offload=true, {ACTOR}.megatron.optimizer_offload=true and the critic's, which make room"
)
_LESS = (
    f"a larger {ROLLOUT}.tensor_model_parallel_size (one copy per replica), or mixed_precision.param_dtype and "
    "model_dtype of 2 bytes"
)
_LESS_MEGATRON = (
    f"or a larger {ROLLOUT}.tensor_model_parallel_size, so that a replica's devices share a pipeline of its copies"
)


@dataclass
class MemoryFindings:
    """Refusals of a run, and warnings for it."""

    refused: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def memory_findings(
    get: Get, stages: Sequence[Stage], devices_each: int, trained: Mapping[str, Sequence[RankMemory]]
) -> MemoryFindings:
    """Return the findings for inference of `stages` where a replica has `devices_each` devices; `trained` holds the
    reports of each model's ranks, in order."""
    if get("fuse.interstage.layout") == "slices":
        return _slices(get, stages, devices_each, trained)
    return MemoryFindings(warned=list(_shared(get, stages, trained["actor"], _kept(trained))))


def _slices(
    get: Get, stages: Sequence[Stage], devices_each: int, trained: Mapping[str, Sequence[RankMemory]]
) -> MemoryFindings:
    found, actor = MemoryFindings(), trained["actor"]
    # With LoRA one copy serves old log-probs and reference.
    stages = tuple(dict.fromkeys("old_log_prob" if s == "ref" and has_adapters(get) else s for s in stages))
    copies = [copy_of(get, stage, devices_each, trained) for stage in stages]
    building, stored = max(copy.building for copy in copies), sum(copy.stored for copy in copies)
    megatron = actor[0].stage is not None
    for node in dict.fromkeys(rank.node for rank in actor):
        here = [number for number, rank in enumerate(actor) if rank.node == node]
        builders = len({number // devices_each for number in here})
        keeps = sum(copy.in_host[number % devices_each] for number in here for copy in copies)
        builds = building * builders
        awaited = sum(rank.awaited for ranks in trained.values() for rank in ranks if rank.node == node)
        free = min(actor[number].host_free for number in here)
        store = actor[here[0]].store
        if store is not None and stored > store:
            found.warned.append(
                f"fuse.interstage.layout='slices': the object store of node {node} holds {_size(store)}, and weights "
                f"of a step take {_size(stored)} of it: Ray writes the rest to disk, and slices wait for it. Raise "
                "ray_kwargs.ray_init.object_store_memory, or --object-store-memory of `ray start`"
            )
        if keeps + max(builds, awaited + stored) > free:
            found.refused.append(
                f"fuse.interstage.layout='slices': copies of {len(stages)} models for {len(here)} devices of node "
                f"{node} keep {_size(keeps)} of host memory, and take {_size(builds)} more while they are built; "
                f"offloaded optimizers will take {_size(awaited)} and weights of a step {_size(stored)} in Ray's "
                f"object store; {_size(free)} are free there. Needs fuse.interstage.layout=shared, "
                f"{_LESS_MEGATRON if megatron else _LESS}"
            )
    for rank, (memory, kept) in enumerate(zip(actor, _kept(trained), strict=True)):
        needs = sum(sum(copy.tensors[rank % devices_each]) for copy in copies)
        if memory.device is not None and kept + needs > memory.device:
            said = (
                f"fuse.interstage.layout='slices': on the device of rank {rank} ({_size(memory.device)}) training "
                f"keeps {_size(kept)} and copies of {len(stages)} models need {_size(needs)}"
            )
            if megatron:
                # They are there in one piece or not at all.
                found.refused.append(f"{said}. Needs fuse.interstage.layout=shared, or {_OFFLOAD_MEGATRON}")
            else:
                found.warned.append(
                    f"{said}: those without room stay in host memory and are copied for each micro-batch. {_OFFLOAD}"
                )
            break
    return found


def _shared(
    get: Get, stages: Sequence[Stage], actor: Sequence[RankMemory], kept_by_rank: Sequence[int]
) -> Iterator[str]:
    key = f"{ROLLOUT}.gpu_memory_utilization"
    share = get(key) or 0.0
    for rank, (memory, kept) in enumerate(zip(actor, kept_by_rank, strict=True)):
        if memory.device is None:
            continue
        logits = (
            max((_tokens(get, _POLICY[s]) for s in stages if s in _POLICY), default=0) * memory.outputs * _LOGIT_BYTES
        )
        # An offloaded shard comes back for inference.
        needs = max(kept, memory.shard) + logits
        if share * memory.device + needs > memory.device:
            yield (
                f"fuse.interstage.layout='shared': on the device of rank {rank} ({_size(memory.device)}) vLLM keeps "
                f"{_size(share * memory.device)} ({key}={share}) while it generates, and inference beside it needs "
                f"{_size(needs)} for weights, moments and the logits of one micro-batch: it may run out of memory. "
                f"Lower {key} or the tokens of a micro-batch ({ROLLOUT}.log_prob_max_token_len_per_gpu), or use "
                f"fuse.interstage.layout=slices; {_OFFLOAD}"
            )
            return


def _kept(trained: Mapping[str, Sequence[RankMemory]]) -> list[int]:
    """Return the bytes that training keeps on the device of each of the actor's ranks; a critic on as many ranks shares
    the devices."""
    actor, critic = trained["actor"], trained.get("critic", ())
    beside = critic if len(critic) == len(actor) else ()
    return [rank.kept + (beside[number].kept if beside else 0) for number, rank in enumerate(actor)]


def _tokens(get: Get, block: str) -> int:
    """Return the most tokens of a micro-batch."""
    if get(f"{block}.log_prob_use_dynamic_bsz"):
        return get(f"{block}.log_prob_max_token_len_per_gpu") or 0
    lengths = (get(f"{ROLLOUT}.prompt_length") or 0) + (get(f"{ROLLOUT}.response_length") or 0)
    return (get(f"{block}.log_prob_micro_batch_size_per_gpu") or 0) * lengths


def _size(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
