"""Which complete groups a released lane trains on: the invariants in verl_fuse_update/streaming.py, and what a run with
`fuse.update.stream` needs."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_fuse import testing
from verl_fuse.errors import FuseError
from verl_fuse.spec.composed import getter
from verl_fuse.spec.contract import label
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.step import LaneView, RolloutView, Sample
from verl_fuse.testing import SetUpTrainer
from verl_fuse_update import parts
from verl_fuse_update.config import UpdateConfig
from verl_fuse_update.lean.options import LeanOptions
from verl_fuse_update.memory import does_not_fit, held_bytes, logits_cost, stream_cost
from verl_fuse_update.plugin import MICRO_BATCH, UpdatePlugin, logits_tokens
from verl_fuse_update.refusals import OF_GROUPS
from verl_fuse_update.streaming import CallSize, call_size, next_groups

ACTOR = "actor_rollout_ref.actor"
FITS = {
    "trainer.v1.trainer_mode": "fuse",
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 8,
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.ppo_mini_batch_size": 8,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    f"{ACTOR}.fsdp_config.fsdp_size": 2,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "fuse.update.stream": True,
    "fuse.update.skip_old_log_prob": True,
    "fuse.elastic.enabled": True,
    "fuse.elastic.release": True,
}


@pytest.fixture(autouse=True)
def torch_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the version of torch that is said to be installed: at first one with streams."""

    def installed(said: str) -> None:
        monkeypatch.setattr("verl_fuse_update.refusals.version", lambda package: said)

    installed("2.13.0+cpu")
    return installed


def view(*lengths: tuple[str, int], each: int = 2) -> RolloutView:
    complete = tuple(Sample(f"{uid}_{n}_0", uid, 4, length - 4) for uid, length in lengths for n in range(each))
    return testing.view(complete=complete)


def lane(queued: int = 0, released: bool = True) -> LaneView:
    return testing.lane(queued, released=released)


def groups(keys) -> list[str]:
    return sorted({key.split("_")[0] for key in keys or ()})


def test_whole_groups_go_first_come_first_served_up_to_the_size_of_a_call():
    seen = view(("a", 10), ("b", 10), ("c", 10))
    assert groups(next_groups(seen, lane(), CallSize(4, None))) == ["a", "b"]
    assert groups(next_groups(seen, lane(), CallSize(None, 45))) == ["a", "b"]
    assert groups(next_groups(seen, lane(), CallSize(None, 40))) == ["a", "b"]
    assert groups(next_groups(seen, lane(), CallSize(None, 39))) == ["a"]
    assert len(next_groups(seen, lane(), CallSize(4, None)) or ()) == 4


def test_one_group_at_least():
    assert groups(next_groups(view(("a", 100), ("b", 5)), lane(), CallSize(None, 10))) == ["a"]
    assert groups(next_groups(view(("a", 9), ("b", 5), each=8), lane(), CallSize(4, None))) == ["a"]


def test_nothing_is_handed_to_a_full_lane_or_one_that_generates_and_none_where_nothing_is_complete():
    seen = view(("a", 10))
    assert next_groups(seen, lane(), CallSize(4, None))
    assert next_groups(seen, lane(queued=1), CallSize(4, None)) is None
    assert next_groups(seen, lane(released=False), CallSize(4, None)) is None
    assert next_groups(view(), lane(), CallSize(4, None)) is None


def test_a_call_is_two_micro_batches_of_each_device():
    assert call_size(FITS.get, 2) == CallSize(16, None)
    dynamic = FITS | {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 100}
    assert call_size(dynamic.get, 2) == CallSize(None, 400)


def config_of(**changes) -> DictConfig:
    config = OmegaConf.create()
    for key, value in {**FITS, **changes}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def refused(**changes) -> set[str]:
    return {refusal.key for refusal in UpdatePlugin().fuse_validate(config=config_of(**changes))}


def test_what_fits_is_not_refused():
    for estimator in OF_GROUPS:
        assert refused(**{"algorithm.adv_estimator": estimator}) == set()
    slices = {"fuse.interstage.enabled": True, "fuse.interstage.layout": "slices", f"{ACTOR}.use_kl_loss": True}
    assert refused(**slices) == set()
    assert refused(**slices, **{"fuse.interstage.migration_threshold": 4, "fuse.elastic.release": False}) == set()
    assert (
        refused(**{f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}) == set()
    )
    pool = {"reward.reward_model.enable": True, "reward.reward_model.enable_resource_pool": True}
    assert refused(**pool) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fuse.update.skip_old_log_prob", False),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 4),
        ("actor_rollout_ref.actor.ppo_epochs", 2),
        (f"{ACTOR}.strategy", "megatron"),
        ("algorithm.adv_estimator", "reinforce_plus_plus"),
        ("algorithm.filter_groups.enable", True),
        (f"{ACTOR}.policy_loss.loss_mode", "geo_mean"),
        (f"{ACTOR}.fsdp_config.fsdp_size", 1),
        (f"{ACTOR}.fsdp_config.fsdp_size", 4),
        (f"{ACTOR}.fsdp_config.fsdp_size", -1),
        (f"{ACTOR}.fsdp_config.dtype", "float16"),
        (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", "fp16"),
        (f"{ACTOR}.ulysses_sequence_parallel_size", 2),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2),
        (f"{ACTOR}.fsdp_config.offload_policy", True),
        (f"{ACTOR}.fsdp_config.param_offload", True),
        (f"{ACTOR}.fsdp_config.optimizer_offload", True),
        (f"{ACTOR}.use_kl_loss", True),
        (f"{ACTOR}.ppo_mini_batch_size", 4),
        ("fuse.elastic.release", False),
        ("actor_rollout_ref.model.lora_rank", 8),
    ],
)
def test_what_cannot_be_streamed_is_refused_by_name(key: str, value: object):
    assert key in refused(**{key: value})


def test_what_keeps_a_group_from_being_complete_beside_generation_is_refused():
    assert refused(**{"reward.reward_model.enable": True}) == {"reward.reward_model.enable_resource_pool"}
    shared = {"fuse.interstage.enabled": True, "fuse.interstage.layout": "shared"}
    assert refused(**shared) == {"fuse.interstage.layout"}


def test_shards_lie_on_the_devices_of_one_replica_however_it_is_cut():
    of_six = {"tensor_model_parallel_size": 1, "data_parallel_size": 2, "pipeline_model_parallel_size": 3}
    sizes = {f"actor_rollout_ref.rollout.{size}": value for size, value in of_six.items()}
    key = f"{ACTOR}.fsdp_config.fsdp_size"
    assert refused(**sizes, **{key: 6}) == set()
    assert refused(**sizes, **{key: 2}) == refused(**sizes, **{key: 3}) == {key}


def test_a_torch_that_cannot_drop_gradients_is_refused_by_its_version_and_breaks_no_other_run(torch_version):
    def targets(config: dict | None) -> set[str]:
        return {label(contract) for contract in UpdatePlugin().fuse_contracts(config=config)}

    reset = "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule.reset_iter_state"
    streams = OmegaConf.create({"fuse": {"update": {"stream": True, "skip_old_log_prob": True}}})
    assert reset in targets(None) & targets(streams)
    torch_version("2.11.0+cpu")
    assert refused() == {"fuse.update.stream"}
    (said,) = UpdatePlugin().fuse_validate(config=config_of())
    assert said.allowed.startswith("false with torch 2.11.0+cpu: fuse.update.stream=true needs 2.13")
    assert reset not in targets(None)
    assert targets(None) > {"verl.workers.engine_workers:TrainingWorker.loss_fn"}, "lean updates work there"


def test_a_mean_over_samples_and_tokens_is_refused():
    assert f"{ACTOR}.loss_agg_mode" in refused(**{f"{ACTOR}.policy_loss.loss_mode": "sapo"})
    key = f"{ACTOR}.loss_scale_factor"
    assert key in refused(**{f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"})


# Of 7 billion parameters on one device, in float32.
RANK = RankMemory("node", 0, None, (7_000_000_000,), 1, 28_000_000_000, 0, 0)


def test_a_device_holds_twenty_bytes_per_parameter_and_what_does_not_fit_is_refused():
    assert held_bytes(RANK, 1) == 20 * 7_000_000_000
    assert "take 130.39 GiB on each device" in stream_cost([RANK], 1)
    assert does_not_fit([RANK], 1) is None
    said = does_not_fit([RANK, replace(RANK, device=80 * 2**30)], 1)
    assert said is not None
    assert said.startswith("fuse.update.stream=true: 130.4 GiB")
    assert "device of rank 1, which has 80.0 GiB" in said
    assert does_not_fit([replace(RANK, shard=7_000_000_000, device=80 * 2**30)], 4) is None
    assert does_not_fit([replace(RANK, device=20 * 7_000_000_000)], 1) is None
    # The copies of a slice on the same devices.
    assert held_bytes(RANK, 1, copies=2) == 24 * 7_000_000_000
    full = replace(RANK, device=22 * 7_000_000_000)
    assert does_not_fit([full], 1, copies=1) is None
    said = does_not_fit([replace(full, device=full.device - 1)], 1, copies=1)
    assert said is not None
    assert "gradients, and 1 of a slice's models, do not fit" in said


def test_logits_beside_their_gradient_are_told_and_refuse_nothing():
    # 16,384 tokens of 152,064 words in bfloat16 are 4.6 GiB; 7 billion parameters on 8 ranks have 13 GiB of shards.
    rank = replace(RANK, shard=3_500_000_000, outputs=152_064, device=80 * 2**30)
    said, small = logits_cost([rank, rank], 16_384)
    assert "of 16384 tokens take 4.6 GiB" in said
    assert "that is 27.0 of 80.0 GiB" in said
    assert not small
    held = 4 * rank.shard + 3 * 2 * 16_384 * rank.outputs
    assert logits_cost([rank, replace(rank, device=held)], 16_384) == (said, False)
    said, small = logits_cost([rank, replace(rank, device=held - 1)], 16_384)
    assert (small, "27.0 of 27.0 GiB" in said) == (True, True)
    # On the host nothing is told.
    assert logits_cost([RANK], 16_384) == ("", False)


def test_the_tokens_of_a_micro_batch_are_its_budget_or_those_of_its_rows():
    def tokens(**changes: object) -> int | None:
        return logits_tokens(getter(config_of(**{"trainer.device": "cuda", **changes})))

    dynamic = {f"{ACTOR}.use_dynamic_bsz": True, MICRO_BATCH: 4096}
    assert tokens(**dynamic) == 4096
    rows = {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3}
    lengths = {"data.max_prompt_length": 10, "data.max_response_length": 30}
    assert tokens(**rows, **lengths) == 120
    assert tokens(**rows, **lengths, **{f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2}) == 60
    assert tokens(**rows, **lengths | {"data.max_prompt_length": None}) is None
    for off in (
        {"trainer.device": "cpu"},
        {f"{ACTOR}.strategy": "megatron"},
        {"fuse.update.response_logits": True},
        {"actor_rollout_ref.model.use_fused_kernels": True},
    ):
        assert tokens(**dynamic | off) is None


@pytest.mark.parametrize(("device", "level"), [(80, "INFO"), (20, "WARNING")])
def test_the_start_warns_where_a_device_is_too_small_for_the_logits(device: int, level: str, caplog):
    rank = replace(RANK, shard=3_500_000_000, outputs=152_064, device=device * 2**30)
    config = config_of(**{"trainer.device": "cuda", f"{ACTOR}.use_dynamic_bsz": True, MICRO_BATCH: 16_384})
    trainer = SimpleNamespace(config=config, training_memory=lambda: {"actor": [rank]})
    with caplog.at_level("INFO"):
        UpdatePlugin()._tell_memory(trainer)
    (record,) = caplog.records
    assert record.levelname == level
    assert ("makes them fewer" in record.message) == (level == "WARNING")


def test_the_plugin_answers_where_it_was_switched_on():
    def run(stream: bool, rank: RankMemory = RANK) -> SetUpTrainer:
        block = UpdateConfig(stream=stream, skip_old_log_prob=True)
        return SetUpTrainer(config=FITS, block=block, devices_each=2, memory={"actor": [rank]})

    for stream in (True, False):
        plugin, trainer = UpdatePlugin(), run(stream)
        plugin.fuse_setup(trainer=trainer)
        ((_, added),) = trainer.used
        options = LeanOptions(False, True, "stock")
        assert (added["make"].func, added["make"].keywords) == (
            (parts.streamed, {"options": options, "deferred": True})
            if stream
            else (parts.lean, {"options": options, "balance": False, "share": False})
        )
        assert groups(plugin.fuse_train_next(view=view(("a", 10)), lane=lane())) == (["a"] if stream else [])
    trainer = run(True)
    trainer._block = replace(trainer._block, skip_zero_gradient=True, metrics="computed")
    UpdatePlugin().fuse_setup(trainer=trainer)
    assert trainer.used[0][1]["make"].keywords["options"] == LeanOptions(True, True, "computed")
    slices = FITS | {"fuse.interstage.enabled": True, "fuse.interstage.layout": "slices"}
    for config, stages, fits in ((FITS, ("ref",), True), (slices, (), True), (slices, ("ref",), False)):
        block, rank = UpdateConfig(stream=True, skip_old_log_prob=True), replace(RANK, device=held_bytes(RANK, 2))
        trainer = SetUpTrainer(
            config=config, block=block, devices_each=2, memory={"actor": [rank]}, streamed_stages=stages
        )
        if fits:
            UpdatePlugin().fuse_setup(trainer=trainer)
            continue
        with pytest.raises(FuseError, match="1 of a slice's models, do not fit"):
            UpdatePlugin().fuse_setup(trainer=trainer)
    full = run(True, replace(RANK, device=80 * 2**30))
    with pytest.raises(FuseError, match="do not fit on the device of rank 0"):
        UpdatePlugin().fuse_setup(trainer=full)
    assert full.used == []
    # An update that is not streamed keeps nothing between its calls.
    UpdatePlugin().fuse_setup(trainer=run(False, replace(RANK, device=1)))
