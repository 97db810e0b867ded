"""Placements that this run cannot carry out, refused before anything is started."""

import math
from collections.abc import Iterator

from verl_fuse.spec.composed import CRITIC, ROLLOUT, Get, has_critic, required, required_if_set
from verl_fuse.spec.step import Refusal

_BLOCK = "fuse.placement"
PLACED, DEFER = f"{_BLOCK}.critic", f"{_BLOCK}.defer"
_FIRST, _COUNT = f"{PLACED}.first", f"{PLACED}.devices"
_NEEDS = f"{PLACED} needs"
_ENGINES = ("fsdp", "fsdp2")


def devices_of(get: Get) -> range | None:
    """The critic's devices; None where it is beside the actor."""
    placed = get(PLACED)
    return range(placed.get("first"), placed.get("first") + placed.get("devices")) if placed else None


def refusals(get: Get) -> Iterator[Refusal]:
    """The reasons why this configuration cannot have its critic where the block says."""
    devices = devices_of(get)
    if devices is None:
        return
    yield from required(get, {"trainer.v1.trainer_mode": ("fuse", f"{_NEEDS} trainer.v1.trainer_mode=fuse")})
    if not has_critic(get):
        key = "algorithm.adv_estimator"
        yield Refusal(key, get(key), f"{_NEEDS} a critic: gae, or set it to null")
        return
    yield from _pool(get, devices)
    yield from _model(get, len(devices))
    if get(DEFER):
        yield from _deferred(get, devices)


def _pool(get: Get, devices: range) -> Iterator[Refusal]:
    there = _all(get)
    if devices.stop > there:
        yield Refusal(
            _COUNT,
            len(devices),
            f"{_FIRST}={devices.start} leaves {max(0, there - devices.start)} of the {there} there are",
        )
    off = {
        "fuse.pipeline.enabled": (
            False,
            f"not with {PLACED}: false, a fused update trains both models in the same processes",
        ),
        "fuse.realloc.schedule": (
            None,
            f"not with {PLACED}: null, layouts change where both models are on all devices",
        ),
    }
    yield from required_if_set(get, off)
    if get("actor_rollout_ref.hybrid_engine") is False:
        yield Refusal(
            "actor_rollout_ref.hybrid_engine",
            False,
            f"{_NEEDS} true: its devices are those of a pool that replicas share",
        )


def _model(get: Get, devices: int) -> Iterator[Refusal]:
    key = f"{CRITIC}.strategy"
    if get(key) not in _ENGINES:
        yield Refusal(key, get(key), f"{_NEEDS} {' or '.join(_ENGINES)}: with Megatron it has not been run")
        return
    key = f"{CRITIC}.fsdp.ulysses_sequence_parallel_size"
    width = get(key) or 1
    if devices % width:
        yield Refusal(key, width, f"a divisor of {_COUNT}, which is {devices}")
        return
    key = f"{CRITIC}.fsdp.fsdp_size"
    shards = get(key) or -1
    if 0 < shards < devices and devices % shards:
        yield Refusal(key, shards, f"-1, or a divisor of {_COUNT}, which is {devices}")
    key, ranks = f"{CRITIC}.ppo_mini_batch_size", devices // width
    samples = (get(key) or 0) * (get(f"{ROLLOUT}.n") or 1)
    if samples % ranks:
        allowed = f"times {ROLLOUT}.n a multiple of the critic's {ranks} data-parallel ranks ({_COUNT}), not {samples}"
        yield Refusal(key, get(key), allowed)


def _deferred(get: Get, devices: range) -> Iterator[Refusal]:
    steps = {"global_profiler.steps": (None, f"not with {DEFER}=true: null, a profile is of one step")}
    yield from required_if_set(get, steps)
    if get("trainer.device") != "cpu":
        yield from _parked(get, devices)


def _parked(get: Get, devices: range) -> Iterator[Refusal]:
    """On an accelerator a replica that generates leaves a critic that is trained no memory."""
    each = math.prod(get(f"{ROLLOUT}.{kind}_parallel_size") or 1 for kind in ("tensor_model", "data", "pipeline_model"))
    free, key = devices.start // each, "fuse.elastic.max_replicas"
    if devices.stop != _all(get) or not free:
        allowed = (
            f"{DEFER}=true on an accelerator needs the last devices, behind at least one replica of {each}: other "
            "replicas do not generate there"
        )
        yield Refusal(_FIRST, devices.start, allowed)
        return
    on = f"{DEFER}=true on an accelerator needs"
    if not get("fuse.elastic.enabled"):
        yield Refusal("fuse.elastic.enabled", False, f"{on} true: it says which replicas generate")
        return
    most = get(key)
    if most is None or most > free:
        yield Refusal(key, most, f"{on} at most {free}: the replicas before device {devices.start}")
    yield from required_if_set(get, {"fuse.elastic.standalone": (0, f"{on} 0: replicas are counted by their devices")})


def _all(get: Get) -> int:
    return (get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1)
