"""When training ranks leave weights for slices: after verl's weight sync, or, where that takes memory of a device, before it wakes the replicas there."""

import warnings
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_module

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    from verl_fuse.host.assembly import exports_on_devices
    from verl_fuse.host.inference.refresh import SliceRefresh

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

OFFLOAD = {
    "actor": "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "critic": "critic.fsdp.param_offload=true",
}
FSDP2 = ["actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2"]


@pytest.mark.parametrize(
    ("overrides", "order"),
    [
        ([], ["replicas", "slices"]),
        ([OFFLOAD["actor"]], ["slices", "replicas"]),
        ([OFFLOAD["critic"]], ["slices", "replicas"]),
        ([*OFFLOAD.values(), *FSDP2], ["replicas", "slices"]),
        ([OFFLOAD["actor"], FSDP2[0]], ["replicas", "slices"]),
    ],
)
def test_an_offloaded_shard_of_fsdp1_is_left_before_the_replicas_wake(overrides, order):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    seen = []
    slices = SimpleNamespace(load=lambda weights: seen.append("slices"))
    lane = SimpleNamespace(submit=lambda work, what: work, recorded=lambda *args: None)
    part = SliceRefresh(slices, lane, dict, exports_on_devices(config))
    part.before_weight_sync(1)
    seen.append("replicas")
    part.after_weight_sync(1)
    assert seen == order
