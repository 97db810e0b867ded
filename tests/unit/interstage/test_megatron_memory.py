"""Memory of Megatron's copies, from what ranks with stages say; see the docstring of verl_fuse_interstage/copies.py."""

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse.spec.composed import getter
from verl_fuse.spec.memory import RankMemory
from verl_fuse_interstage.copies import copy_of
from verl_fuse_interstage.memory import memory_findings

GIB = 2**30
ACTOR = "actor_rollout_ref.actor.megatron"


def ranks(tp: int, pp: int, dp: int = 1, **more: Any) -> list[RankMemory]:
    """Each rank has two tensors of 1 Gi elements of its stage, the last one a second copy of a head of as many; it
    leaves 1 GiB of a step's weights."""
    said: dict[str, Any] = {"host_free": 10**15, "device": 80 * GIB, "outputs": 1, "shard": 0, "kept": 0, "awaited": 0}
    return [
        RankMemory(
            node="n0",
            parameters=(GIB, GIB),
            stage=rank // (tp * dp),
            second_head=GIB if pp > 1 and rank // (tp * dp) == pp - 1 else 0,
            left=GIB,
            **said | more,
        )
        for rank in range(tp * pp * dp)
    ]


def asking(tp: int, settings: dict | None = None):
    config = OmegaConf.create({"fuse": {"interstage": {"layout": "slices"}}})
    for block in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        OmegaConf.update(config, f"{block}.megatron.tensor_model_parallel_size", tp)
    for key, value in (settings or {}).items():
        OmegaConf.update(config, key, value)
    return getter(config)


@pytest.mark.parametrize(
    ("tp", "pp", "devices", "tensors"),
    [
        # One stage: all tensors, and the tied head once.
        (1, 4, 1, [8]),
        (2, 4, 2, [8, 8]),
        # Two stages of two trained ones each: the last has a head of its own.
        (1, 4, 2, [4, 5]),
        (2, 2, 4, [2, 2, 3, 3]),
        # What the pipeline does not take are copies.
        (1, 1, 4, [2, 2, 2, 2]),
        (1, 2, 4, [2, 2, 3, 3]),
        (1, 4, 6, [4, 4, 4, 5, 5, 5]),
    ],
)
def test_a_device_has_its_part_of_the_copy_that_its_replica_has_room_for(tp, pp, devices, tensors):
    copy = copy_of(asking(tp), "old_log_prob", devices, {"actor": ranks(tp, pp)})
    assert [sum(of) / (2 * GIB) for of in copy.tensors] == tensors
    assert copy.building == 0
    assert copy.stored == tp * pp * GIB, "what every rank leaves"


def test_the_critic_s_stages_cut_the_actor_s_copy_too():
    trained = {"actor": ranks(1, 4), "critic": ranks(1, 2, dp=2)}
    for stage, tensors in (("old_log_prob", [4, 5]), ("ref", [4, 5]), ("values", [2, 3])):
        copy = copy_of(asking(1), stage, 2, trained)
        assert [sum(of) / (2 * GIB) for of in copy.tensors] == tensors
        assert copy.stored == (0 if stage == "ref" else 4 * GIB)


def refused(**more: Any) -> list[str]:
    """Of copies of a policy tp2 pp2 and its reference, replicas of two devices: 8 GiB each on each device."""
    trained = {"actor": ranks(2, 2, **more)}
    return memory_findings(asking(2), ("old_log_prob", "ref"), 2, trained).refused


@pytest.mark.parametrize(("free", "good"), [(4 * 16 + 4, True), (4 * 16 + 3, False)])
def test_a_node_has_host_memory_for_all_copies_and_a_step_s_weights_or_the_run_is_refused(free, good):
    said = refused(host_free=free * GIB)
    assert (said == []) is good
    for line in said:
        assert "copies of 2 models for 4 devices of node n0 keep 64.0 GiB of host memory" in line
        assert "weights of a step 4.0 GiB in Ray's object store; 67.0 GiB are free there" in line
        assert "so that a replica's devices share a pipeline" in line


@pytest.mark.parametrize(("kept", "good"), [(64, True), (65, False)])
def test_a_device_has_room_for_its_part_of_all_copies_or_the_run_is_refused(kept, good):
    said = refused(kept=kept * GIB)
    assert (said == []) is good
    for line in said:
        assert "on the device of rank 0 (80.0 GiB) training keeps 65.0 GiB and copies of 2 models need 16.0 GiB" in line
        assert f"{ACTOR}.param_offload=true" in line


def test_a_tensor_is_pinned_as_a_power_of_two_unless_the_device_is_the_host():
    odd = [replace(rank, parameters=(3 * GIB,)) for rank in ranks(1, 1)]
    for device, kept in ((80 * GIB, 8), (None, 6)):
        trained = {"actor": [replace(rank, device=device) for rank in odd]}
        assert copy_of(asking(1), "ref", 1, trained).in_host == [kept * GIB]
