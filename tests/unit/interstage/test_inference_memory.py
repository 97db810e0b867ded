"""Memory that inference needs, computed from parameters, dtypes and devices; see the docstring of
verl_fuse_interstage/memory.py."""

from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse.spec.composed import getter
from verl_fuse.spec.memory import RankMemory
from verl_fuse_interstage.memory import memory_findings

GIB = 2**30
ROLLOUT = "actor_rollout_ref.rollout"
FP32 = {"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32"}
STAGES = ("old_log_prob", "ref", "values")


def ranks(elements: int = GIB, count: int = 8, each: int = 8, **more: Any) -> list[RankMemory]:
    """Of a model with four equal parameters of `elements` elements in all, on nodes of `each` devices."""
    said: dict[str, Any] = {
        "host_free": 10**15,
        "device": 80 * GIB,
        "outputs": 1,
        "shard": 0,
        "kept": 0,
        "awaited": 0,
    } | more
    return [RankMemory(node=f"n{rank // each}", parameters=(elements // 4,) * 4, **said) for rank in range(count)]


def found(trained: dict, settings: dict | None = None, layout: str = "slices", stages=STAGES, devices: int = 1):
    config = OmegaConf.create({})
    for key, value in {"fuse.interstage.layout": layout, **(settings or {})}.items():
        OmegaConf.update(config, key, value)
    return memory_findings(getter(config), stages, devices, trained)


def refused(free: int, settings: dict | None = None, **more: Any) -> bool:
    """Whether 8 devices of one node refuse copies of actor and critic, with 1 Gi parameters each, and
    `free` GiB of host memory."""
    trained = {"actor": ranks(host_free=free * GIB), "critic": ranks(host_free=free * GIB)}
    return bool(found(trained, settings, **more).refused)


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("settings", "devices", "needs"),
    [
        # Three copies of 2 GiB in bfloat16 for each of eight devices, and one of 4 GiB while it is built.
        ({}, 1, 8 * (3 * 2 + 4)),
        # FSDP1 pins as much again, for gradients.
        ({"actor_rollout_ref.actor.strategy": "fsdp"}, 1, 8 * (4 * 2 + 4)),
        ({f"{engine}.strategy": "fsdp" for engine in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")}, 1, 8 * (6 * 2 + 4)),
        ({"actor_rollout_ref.actor.strategy": "fsdp2"}, 1, 8 * (3 * 2 + 4)),
        # One of them in float32.
        (FP32, 1, 8 * (4 + 2 + 2 + 4)),
        # With LoRA the policy's copy is the reference as well.
        ({"actor_rollout_ref.model.lora_rank": 8}, 1, 8 * (2 * 2 + 4)),
        # A replica of four devices shares them; two replicas build theirs.
        ({}, 4, 2 * (3 * 2 + 4)),
        # Or two pairs of devices have one each.
        ({"actor_rollout_ref.actor.fsdp_config.fsdp_size": 2}, 4, 2 * (2 * 2 + 2 + 2 + 4)),
        ({f"{block}.model_dtype": "bf16" for block in ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")}, 1, 8 * (3 * 2 + 2)),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_a_node_needs_its_copies_and_the_largest_that_is_being_built(settings, devices, needs):
    assert not refused(needs, settings, devices=devices)
    assert refused(needs - 1, settings, devices=devices)


def test_a_stage_that_is_not_streamed_has_no_copy():
    assert not refused(8 * (2 + 4), stages=("old_log_prob",))


@pytest.mark.parametrize(("awaited", "good"), [(4, True), (5, False)])
def test_offloaded_moments_come_once_copies_are_built(awaited, good):
    """One copy of 2 GiB and 4 while it is built, of each of eight ranks; actor and critic await as much again, and the
    object store has the actor's weights."""
    free = (8 * (2 + 2 * 4) + 2) * GIB
    trained = {model: ranks(host_free=free, awaited=awaited * GIB) for model in ("actor", "critic")}
    assert (found(trained, stages=("old_log_prob",)).refused == []) is good


@pytest.mark.parametrize(("awaited", "good"), [(1, True), (2, False)])
def test_the_object_store_has_each_trained_model_once_beside_the_copies(awaited, good):
    """Two ranks keep 3 x 2 GiB each and build 4: as much as actor and critic in the store (2 x 2) and moments."""
    trained = {model: ranks(count=2, host_free=20 * GIB, awaited=awaited * GIB) for model in ("actor", "critic")}
    said = found(trained)
    assert (said.refused == []) is good
    for line in said.refused:
        assert "offloaded optimizers will take 8.0 GiB and weights of a step 4.0 GiB in Ray's object store" in line


@pytest.mark.parametrize(("stages", "takes"), [(STAGES, 4), (("old_log_prob", "ref"), 2), (("values",), 2)])
def test_weights_that_the_object_store_does_not_hold_are_a_warning_for_each_node(stages, takes):
    for store, lines in ((takes * GIB, 0), (takes * GIB - 1, 2)):
        trained = {model: ranks(count=16, store=store) for model in ("actor", "critic")}
        warned = found(trained, stages=stages).warned
        assert [line.partition(" holds ")[0].rpartition(" ")[2] for line in warned] == ["n0", "n1"][:lines]
        for line in warned:
            assert f"weights of a step take {takes}.0 GiB of it: Ray writes the rest to disk" in line
            assert "ray_kwargs.ray_init.object_store_memory" in line


def test_each_node_needs_its_own_only():
    actor = ranks(count=16, host_free=8 * (2 + 4) * GIB)
    assert found({"actor": actor}, stages=("old_log_prob",)).refused == []


def test_the_rank_of_a_node_that_has_least_decides_and_moments_of_other_nodes_do_not():
    """Two nodes of two ranks: each needs 2 x (2 + 4) GiB, or with moments 2 x (2 + 5) and 2 in the object store."""
    actor = ranks(count=4, each=2, host_free=14 * GIB)
    scarce = [*actor[:3], replace(actor[3], host_free=12 * GIB - 1)]
    assert [
        line.partition(" keep ")[0][-2:] for line in found({"actor": scarce}, stages=("old_log_prob",)).refused
    ] == ["n1"]
    awaiting = [*actor[:2], *(replace(rank, awaited=4 * GIB) for rank in actor[2:])]
    assert found({"actor": awaiting}, stages=("old_log_prob",)).refused == []
    awaiting[1] = replace(actor[1], awaited=8 * GIB + 1)
    awaiting[2] = replace(actor[2], awaited=8 * GIB)
    said = found({"actor": [*awaiting[:3], actor[3]]}, stages=("old_log_prob",)).refused
    assert [line.partition(" keep ")[0][-2:] for line in said] == ["n0"]


def test_what_torch_pins_is_a_power_of_two():
    """Four parameters of 0.75 Gi elements a quarter take 2 GiB where 1.5 would do; the host of a CPU pins nothing."""
    elements, free = 3 * GIB, (4 * 2 + 12) * GIB
    for device, fits in ((80 * GIB, 0), (None, 2 * GIB)):
        least = free - fits
        for host_free, good in ((least, True), (least - 1, False)):
            actor = ranks(elements, count=1, host_free=host_free, device=device)
            assert (found({"actor": actor}, stages=("old_log_prob",)).refused == []) is good


def test_a_refusal_names_node_bytes_and_keys():
    trained = {"actor": ranks(host_free=9 * GIB)}
    (line,) = found(trained, stages=("old_log_prob", "ref")).refused
    assert line.startswith(
        "fuse.interstage.layout='slices': copies of 2 models for 8 devices of node n0 keep 32.0 GiB of host memory, "
        "and take 32.0 GiB more while they are built; "
        "offloaded optimizers will take 0.0 GiB and weights of a step 2.0 GiB in Ray's object "
        "store; 9.0 GiB are free there. Needs fuse.interstage.layout=shared, a larger "
        "actor_rollout_ref.rollout.tensor_model_parallel_size"
    )


@pytest.mark.parametrize(("kept", "lines"), [(37, 0), (38, 1)])
def test_copies_without_room_on_the_device_are_said_once(kept, lines):
    trained = {"actor": ranks(kept=kept * GIB), "critic": ranks(kept=kept * GIB)}
    warned = found(trained).warned
    assert len(warned) == lines
    for line in warned:
        assert "on the device of rank 0 (80.0 GiB) training keeps 76.0 GiB and copies of 3 models need 6.0 GiB" in line
        assert "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true" in line


def test_a_critic_with_devices_of_its_own_takes_none_of_the_actors():
    trained = {"actor": ranks(kept=70 * GIB), "critic": ranks(count=2, kept=70 * GIB)}
    assert found(trained).warned == []


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("settings", "more", "lines"),
    [
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.5}, {"kept": 40 * GIB}, 0),
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.5}, {"kept": 40 * GIB + 1}, 1),
        # An offloaded shard comes back.
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.75}, {"shard": 21 * GIB}, 1),
        # Logits of 64 x 128 tokens over 2**20 outputs: 48 GiB.
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.5, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 64, f"{ROLLOUT}.prompt_length": 28, f"{ROLLOUT}.response_length": 100}, {"outputs": 2**20}, 1),
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.5, f"{ROLLOUT}.log_prob_use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 4096}, {"outputs": 2**20}, 0),
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.9}, {"kept": 40 * GIB, "device": None}, 0),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_inference_without_memory_beside_vllm_is_a_warning_in_layout_shared(settings, more, lines):
    said = found({"actor": ranks(**more)}, settings, "shared")
    assert (len(said.warned), said.refused) == (lines, [])
    for line in said.warned:
        key = f"{ROLLOUT}.gpu_memory_utilization"
        assert f"({key}={settings[key]}) while it generates" in line
        assert f"Lower {key}" in line
