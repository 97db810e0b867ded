"""Refuse placements that a run cannot carry out, before anything is started."""

from collections.abc import Iterator
from typing import Any

from verl_fuse.spec.composed import (
    CRITIC,
    ROLLOUT,
    Get,
    has_critic,
    needed_beside,
    of_mode_fuse,
    on_accelerators,
    replica_devices,
    required,
    training_devices,
)
from verl_fuse.spec.step import Refusal

_BLOCK = "fuse.placement"
PLACED, DEFER = f"{_BLOCK}.critic", f"{_BLOCK}.defer"
_FIRST, _COUNT = f"{PLACED}.first", f"{PLACED}.devices"
_NEEDS = f"{PLACED} needs"
_OF_DEVICES = {"fuse.elastic.standalone": (0, "0: replicas are counted by their devices")}
# In place of devices: the run chooses them.
AUTO = "auto"
ELASTIC_ON, MOST_REPLICAS, LEAST_REPLICAS = (
    "fuse.elastic.enabled",
    "fuse.elastic.max_replicas",
    "fuse.elastic.min_replicas",
)
_ENGINES = ("fsdp", "fsdp2")


def devices_of(get: Get) -> range | None:
    """Return the critic's devices; None where the critic is beside the actor, or the run has not chosen yet."""
    placed = get(PLACED)
    if not placed or placed == AUTO:
        return None
    return range(placed.get("first"), placed.get("first") + placed.get("devices"))


def refusals(get: Get) -> Iterator[Refusal]:
    """Return the reasons why this configuration cannot have its critic where the block says."""
    devices = devices_of(get)
    if devices is None and get(PLACED) != AUTO:
        return
    yield from of_mode_fuse(get, PLACED)
    if not has_critic(get):
        key = "algorithm.adv_estimator"
        yield Refusal(key, get(key), f"{_NEEDS} a critic: gae, or set it to null")
    apart = (False, "false: a fused update trains both models in the same processes")
    yield from needed_beside(get, PLACED, {"fuse.pipeline.enabled": apart})
    if get("actor_rollout_ref.hybrid_engine") is False:
        allowed = f"{_NEEDS} true: its devices are those of a pool that replicas share"
        yield Refusal("actor_rollout_ref.hybrid_engine", False, allowed)
    if devices is None:
        yield from _chosen(get)
        return
    if devices.stop > (there := training_devices(get)):
        allowed = f"{_FIRST}={devices.start} leaves {max(0, there - devices.start)} of the {there} there are"
        yield Refusal(_COUNT, len(devices), allowed)
    yield from _model(get, len(devices))
    if get(DEFER):
        yield from _deferred(get, devices)


def candidates(get: Get) -> dict[int, list[Refusal]]:
    """Return the numbers of last replicas on whose devices the critic may be, with the refusals of each number."""
    found: dict[int, list[Refusal]] = {}
    apart, replicas = 1, replicas_of(get)
    while apart < replicas:
        keys = keys_of(get, apart)
        placed = lambda key, keys=keys: keys.get(key, get(key))  # noqa: E731
        devices = devices_of(placed)
        assert devices is not None, "keys_of says where"
        found[apart] = [*_model(placed, len(devices)), *_deferred(placed, devices)]
        if (get(LEAST_REPLICAS) or 1) > replicas - apart:
            found[apart].append(
                Refusal(LEAST_REPLICAS, get(LEAST_REPLICAS), f"at most {replicas - apart}, the replicas that are left")
            )
        apart *= 2
    return found


def keys_of(get: Get, apart: int) -> dict[str, Any]:
    """Return the keys of a run whose critic has the devices of the last `apart` replicas, which do not generate."""
    each, left = replica_devices(get), replicas_of(get) - apart
    place = {"first": left * each, "devices": apart * each}
    return {PLACED: place, DEFER: True, MOST_REPLICAS: min(get(MOST_REPLICAS) or left, left)}


def replicas_of(get: Get) -> int:
    """Return the number of rollout replicas on the training devices."""
    return training_devices(get) // replica_devices(get)


def _chosen(get: Get) -> Iterator[Refusal]:
    """Refuse a run that chooses the devices, where nothing keeps replicas there from generating or no choice is
    possible."""
    on = f"{PLACED}={AUTO}"
    yield from required(get, {ELASTIC_ON: (True, f"{on} needs true: it says which replicas generate")})
    yield from needed_beside(get, on, _OF_DEVICES)
    key = f"{CRITIC}.strategy"
    if get(key) == "fsdp":
        yield Refusal(key, "fsdp", f"{on} needs fsdp2: a checkpoint of other devices' critic is read of FSDP2 alone")
    found = candidates(get)
    if not found:
        allowed = f"needs two rollout replicas or more on the training devices, not {replicas_of(get)}"
        yield Refusal(PLACED, AUTO, allowed)
    elif all(found.values()):
        own = {ELASTIC_ON, "fuse.elastic.standalone"}
        yield from (refusal for refusal in found[1] if refusal.key not in own)


def _model(get: Get, devices: int) -> Iterator[Refusal]:
    key = f"{CRITIC}.strategy"
    if get(key) not in _ENGINES:
        yield Refusal(key, get(key), f"{_NEEDS} {' or '.join(_ENGINES)}: with Megatron it has not been run")
    key = f"{CRITIC}.fsdp.fsdp_size"
    shards = get(key) or -1
    if 0 < shards < devices and devices % shards:
        yield Refusal(key, shards, f"-1, or a divisor of {_COUNT}, which is {devices}")
    key = f"{CRITIC}.fsdp.ulysses_sequence_parallel_size"
    width = get(key) or 1
    if devices % width:
        yield Refusal(key, width, f"a divisor of {_COUNT}, which is {devices}")
        # The number of ranks that share out a mini-batch is not known then.
        return
    key, ranks = f"{CRITIC}.ppo_mini_batch_size", devices // width
    samples = (get(key) or 0) * (get(f"{ROLLOUT}.n") or 1)
    if samples % ranks:
        allowed = f"times {ROLLOUT}.n a multiple of the critic's {ranks} data-parallel ranks ({_COUNT}), not {samples}"
        yield Refusal(key, get(key), allowed)


def _deferred(get: Get, devices: range) -> Iterator[Refusal]:
    yield from needed_beside(get, f"{DEFER}=true", {"global_profiler.steps": (None, "null: a profile is of one step")})
    if on_accelerators(get):
        yield from _parked(get, devices)


def _parked(get: Get, devices: range) -> Iterator[Refusal]:
    """Refuse a replica that generates on the critic's accelerator: it leaves a critic that is trained no memory."""
    each, key = replica_devices(get), MOST_REPLICAS
    free = devices.start // each
    there = devices.stop == training_devices(get) and free > 0
    if not there:
        allowed = (
            f"{DEFER}=true on an accelerator needs the last devices, behind at least one replica of {each}: other "
            "replicas do not generate there"
        )
        yield Refusal(_FIRST, devices.start, allowed)
    on = f"{DEFER}=true on an accelerator"
    if not get(ELASTIC_ON):
        yield Refusal(ELASTIC_ON, False, f"{on} needs true: it says which replicas generate")
    most = get(key)
    if there and (most is None or most > free):
        yield Refusal(key, most, f"{on} needs at most {free}: the replicas before device {devices.start}")
    yield from needed_beside(get, on, _OF_DEVICES)
