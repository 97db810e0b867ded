"""Values of the overrides of a plan, without a search; tests/integration/test_plan_overrides.py gives them to verl."""

from dataclasses import replace

import pytest
from workloads import ppo

from verl_fuse.plan.overrides import placement_overrides
from verl_fuse.plan.space import CallConfig
from verl_fuse.spec.cluster import Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.workload import Call

CALLS = {
    "actor_generate": Call("actor_generate", "actor", "generate"),
    "critic_infer": Call("critic_infer", "critic", "infer", ("actor_generate",)),
    "critic_train": Call("critic_train", "critic", "train", ("critic_infer",)),
    "actor_train": Call("actor_train", "actor", "train", ("critic_infer",)),
}
# 256 sequences of 1,000 tokens, which may have 1,499; four updates.
WORKLOAD = replace(
    ppo(), prompt=LengthDistribution.parse("fixed:500"), response=LengthDistribution.parse("uniform:1-999")
)


def overrides(context: int = 1, layout: Layout | None = None, **microbatches: int):
    """On two devices, or two for each part of a sequence."""
    layout = layout or Layout(dp=2, cp=context)
    config = CallConfig(layout, 1, False, 1.0, 1.0, 1.0)
    chosen = {
        name: (call, Mesh(0, layout.devices), replace(config, microbatches=microbatches.get(name, 1)))
        for name, call in CALLS.items()
    }
    return placement_overrides(WORKLOAD, cluster_named("h100", 1), "megatron", chosen)


@pytest.mark.parametrize(
    ("train", "infer", "tokens"),
    [
        # An update has 32 sequences on each device, inference 128.
        (8, 8, 4000),
        (2, 32, 4000),
        (2, 8, 16000),
        (8, 4, 4000),
        # One whole sequence at least.
        (32, 1, 1499),
        (1, 1, 32000),
    ],
)
def test_the_critic_s_only_budget_fits_its_update_and_its_inference(train, infer, tokens):
    found = overrides(critic_train=train, critic_infer=infer)
    keys = ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu")
    assert {found[f"critic.{key}"] for key in keys} == {tokens}
    assert found["++critic.ppo_infer_max_token_len_per_gpu"] == tokens
    assert found["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == 32000, "the actor has its own"


def test_a_budget_is_of_one_device_where_a_sequence_lies_on_several():
    found = overrides(context=2, critic_train=8, critic_infer=8)
    assert found["critic.ppo_max_token_len_per_gpu"] == 2000


def test_folded_experts_are_told_to_verl():
    key = "actor_rollout_ref.actor.megatron.expert_{}_parallel_size".format
    folded, cut = overrides(layout=Layout.parse("tp2 dp2 ep4 etp1")), overrides(layout=Layout.parse("tp2 dp2 ep2"))
    assert (folded[key("model")], folded[key("tensor")]) == (4, 1)
    assert (cut[key("model")], cut.get(key("tensor"))) == (2, None), "verl's default: as many as tensor ranks"
