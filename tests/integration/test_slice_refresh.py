"""When training ranks leave weights for slices: after verl's weight sync, or, where that takes memory of a device,
before it wakes the replicas there."""

import warnings
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_module

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")

    from verl_fuse.host.weights.exports import Export
    from verl_fuse_interstage.slices.refresh import SliceRefresh, exports_on_devices
    from verl_fuse_interstage.slices.worker import SliceWorker

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


def test_slices_give_memory_back_after_the_last_inference_of_a_step():
    seen = []
    slices = SimpleNamespace(release_memory=lambda: seen.append("slices"), load=lambda weights: seen.append("weights"))
    lane = SimpleNamespace(submit=lambda work, what: work, recorded=lambda *args: None)
    part = SliceRefresh(slices, lane, dict, on_devices=False)
    part.after_inference(1)
    part.before_weight_sync(1)
    part.after_weight_sync(1)
    assert seen == ["slices", "weights"]


def test_a_worker_of_a_slice_empties_the_cache_of_its_device(monkeypatch):
    calls = []
    device = SimpleNamespace(
        is_available=lambda: True,
        memory_reserved=lambda: 0,
        memory_allocated=lambda: 0,
        empty_cache=lambda: calls.append("empty_cache"),
        synchronize=lambda: calls.append("synchronize"),
    )
    monkeypatch.setattr("verl.utils.memory_utils.get_torch_device", lambda: device)
    monkeypatch.setattr("verl_fuse_interstage.slices.worker.get_torch_device", lambda: device)
    model = SimpleNamespace(get_dispatch_collect=dict, engine=None)
    monkeypatch.setattr("verl_fuse_interstage.slices.worker.build_models", lambda *args: {"ref": model})
    weights = SimpleNamespace(release=lambda: calls.append("release"))
    monkeypatch.setattr("verl_fuse_interstage.slices.worker._device_weights", lambda engine, name: weights)
    worker = SimpleNamespace(
        _stages=("ref",),
        _config=None,
        _critic=None,
        _engines={},
        world_size=1,
        _number=0,
        set_dispatch_collect=lambda mesh_name: None,
    )
    SliceWorker.init_model(worker)
    assert calls == ["empty_cache", "synchronize"]
    SliceWorker.release_memory(worker)
    assert calls[2:] == ["release", "synchronize", "empty_cache"]


def test_all_parameters_are_exported_once_and_then_those_that_are_trained():
    asked = []

    def export(whole: bool) -> dict:
        asked.append(whole)
        return {"old_log_prob": Export((), 100 if whole else 7, frozenset()), "values": Export((), 1, frozenset())}

    slices = SimpleNamespace(release_memory=lambda: None, load=lambda weights: None)
    lane = SimpleNamespace(submit=lambda work, what: work(), recorded=lambda name, category, work: work())
    part = SliceRefresh(slices, lane, export, on_devices=False)
    found = []
    for step in (1, 2, 3):
        part.after_weight_sync(step - 1)
        part.after_inference(step)
        found.append(part.metrics["fuse/slice_weight_bytes"])
    assert (asked, found) == ([True, False, False], [101.0, 8.0, 8.0])
