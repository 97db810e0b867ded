import dataclasses

import pytest
from workloads import grpo, ppo

from verl_fuse.plan.layouts import legal_layouts
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model_names import model_named


@pytest.mark.parametrize("kind", ["generate", "infer", "train"])
@pytest.mark.parametrize("size", [1, 4, 8, 24, 64])
def test_every_layout_fills_the_mesh_divides_the_model_and_the_batch(kind, size: int):
    workload = ppo()
    unit = workload.sequences // (workload.minibatches if kind == "train" else 1)
    for layout in legal_layouts(workload.actor, kind, workload, size, 8):
        stage = layout.tp * layout.cp * layout.dp
        assert layout.devices == size
        assert layout.fault(workload.actor) is None
        assert unit % layout.dp == 0
        assert stage % 8 == 0 or 8 % stage == 0


def test_one_node_reads_like_a_list():
    layouts = legal_layouts(model_named("llama-7b"), "train", ppo(), 4, 8)
    assert [str(layout) for layout in layouts] == [
        "pp4",
        "pp2 dp2",
        "dp4 fsdp4",
        "dp4",
        "tp2 pp2",
        "tp2 dp2",
        "tp4",
    ]


def test_fsdp_trains_and_infers_on_all_devices_or_on_whole_nodes():
    def shards(kind, size: int) -> list[int]:
        found = legal_layouts(model_named("llama-7b"), kind, ppo(), size, 8)
        return [layout.shards for layout in found if layout.shards]

    assert shards("train", 4) == [4]
    assert shards("train", 16) == [8, 16]
    assert shards("infer", 64) == [8, 16, 32, 64]
    assert shards("generate", 64) == []


def test_only_long_sequences_are_split_and_only_experts_spread():
    short, long = grpo(), dataclasses.replace(grpo(), response=LengthDistribution.parse("fixed:16384"))
    dense, experts = model_named("qwen2.5-7b"), model_named("qwen3-30b-a3b")
    assert {layout.cp for layout in legal_layouts(dense, "train", short, 8, 8)} == {1}
    assert {layout.cp for layout in legal_layouts(dense, "train", long, 8, 8)} == {1, 2, 4, 8}
    assert {layout.cp for layout in legal_layouts(dense, "generate", long, 8, 8)} == {1}
    assert {layout.ep for layout in legal_layouts(dense, "train", short, 8, 8)} == {1}
    assert {layout.ep for layout in legal_layouts(experts, "train", short, 8, 8)} == {1, 2, 4, 8}


def test_tensor_ranks_fold_into_expert_ranks_but_in_the_rollout():
    experts = model_named("qwen3-235b-a22b")
    long = dataclasses.replace(grpo(), prompts=64, response=LengthDistribution.parse("fixed:16384"))
    found = {kind: legal_layouts(experts, kind, long, 128, 8) for kind in ("generate", "infer", "train")}
    assert Layout.parse("tp2 pp8 dp4 cp2 ep16 etp1") in found["train"]
    assert not any(layout.etp for layout in found["generate"])
    for layout in (layout for kind in ("infer", "train") for layout in found[kind]):
        assert (layout.etp == 1) == (layout.dp * layout.cp % layout.ep > 0)


def test_a_layout_that_cannot_divide_the_heads_is_not_legal():
    assert {layout.tp for layout in legal_layouts(model_named("qwen2.5-7b"), "infer", ppo(), 8, 8)} == {1, 2, 4}
