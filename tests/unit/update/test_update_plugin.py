"""Refusals of the plugin `update`, and the runs in which it takes part."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.composed import getter
from verl_fuse.spec.contract import Function, Name
from verl_fuse.testing import SetUpTrainer
from verl_fuse_update.config import UpdateConfig
from verl_fuse_update.features import FEATURES
from verl_fuse_update.lean.options import LeanOptions
from verl_fuse_update.losses import ANY_LOSSES, BALANCED_LOSSES, ROW_LOSSES
from verl_fuse_update.plugin import UpdatePlugin

PLUGIN = UpdatePlugin()
SKIP, OWN = "fuse.update.skip_zero_gradient", "fuse.update.skip_old_log_prob"
ACTOR = "actor_rollout_ref.actor"
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"


def composed(*switches, **changes):
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}},
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": False}},
            "data": {"train_batch_size": 8},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2", "ppo_mini_batch_size": 8, "policy_loss": {"loss_mode": "vanilla"}}
            },
        }
    )
    for key, value in {**dict.fromkeys(switches, True), **changes}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def refused(*switches, **changes) -> set[str]:
    return {refusal.key for refusal in PLUGIN.fuse_validate(config=composed(*switches, **changes))}


def parts_of(config, block, shares=()) -> dict[str, dict[str, Any]]:
    """The parts that the plugin adds to a step, with their settings."""
    trainer = SetUpTrainer(config=config, block=block, shares_prompts=shares)
    UpdatePlugin().fuse_setup(trainer=trainer)
    assert {name for name, _ in trainer.used} == {"add_part"}
    makers = [arguments["make"] for _, arguments in trainer.used]
    return {getattr(make, "func", make).__name__: getattr(make, "keywords", {}) for make in makers}


def test_what_fits_is_not_refused_and_without_a_switch_nothing_is_asked():
    for strategy in ("fsdp", "fsdp2", "megatron"):
        assert refused(SKIP, OWN, **{f"{ACTOR}.strategy": strategy}) == set()
    off = {f"{ACTOR}.strategy": "veomni", f"{ACTOR}.use_kl_loss": True, "trainer.v1.trainer_mode": "sync"}
    assert refused(**off) == set()
    assert PLUGIN.fuse_contracts(config=composed()) == ()


EITHER = {
    "trainer.v1.trainer_mode": "sync",
    f"{ACTOR}.strategy": "veomni",
    "fuse.pipeline.enabled": True,
    "distillation.enabled": True,
    "algorithm.rollout_correction.rollout_is_batch_normalize": True,
    "actor_rollout_ref.model.mtp.enable": True,
    "actor_rollout_ref.model.lora.dropout": 0.1,
    "actor_rollout_ref.model.override_config.attention_dropout": 0.1,
    f"{ACTOR}.fsdp_config.qat.enable": True,
    f"{ACTOR}.policy_loss.loss_mode": "clip_cov",
}
ONLY_SKIP = {
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.entropy_coeff": 0.01,
    f"{ACTOR}.policy_loss.loss_mode": "dro",
}
ONLY_OWN = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.adv_estimator": "optimal_token_baseline",
    "algorithm.rollout_correction.bypass_mode": True,
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_rs": "token_k1",
}
MEGATRON = {
    f"{ACTOR}.megatron.dynamic_context_parallel": True,
    f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": 2,
    f"{ACTOR}.megatron.use_megatron_fsdp": True,
    f"{ACTOR}.megatron.router_replay.mode": "R2",
    f"{TRANSFORMER}.hidden_dropout": 0.1,
    f"{TRANSFORMER}.fp8": "hybrid",
}
MEGATRON_SKIP = {
    f"{ACTOR}.megatron.context_parallel_size": 2,
    f"{TRANSFORMER}.moe_aux_loss_coeff": 0.01,
    f"{TRANSFORMER}.moe_z_loss_coeff": 0.01,
    f"{TRANSFORMER}.moe_router_enable_expert_bias": True,
}


@pytest.mark.parametrize(("key", "value"), EITHER.items())
def test_neither_switch_goes_with(key, value):
    assert refused(SKIP, **{key: value}) == refused(OWN, **{key: value}) == {key}


@pytest.mark.parametrize(("key", "value"), ONLY_SKIP.items())
def test_what_gives_every_sample_a_gradient_is_refused(key, value):
    assert refused(SKIP, **{key: value}) == {key}
    assert refused(OWN, **{key: value}) == set()


@pytest.mark.parametrize(("key", "value"), ONLY_OWN.items())
def test_what_reads_old_log_probs_is_refused(key, value):
    assert refused(OWN, **{key: value}) == {key}
    assert refused(SKIP, **{key: value}) == set()


def test_the_first_of_several_mini_batches_is_known_unless_it_is_drawn():
    several, shuffled = {f"{ACTOR}.ppo_mini_batch_size": 4, f"{ACTOR}.ppo_epochs": 2}, {f"{ACTOR}.shuffle": True}
    assert refused(OWN, **several) == refused(OWN, **shuffled) == set()
    assert refused(OWN, **several, **shuffled) == {f"{ACTOR}.shuffle"}
    assert refused(SKIP, **several, **shuffled) == set()


@pytest.mark.parametrize(("key", "value"), (MEGATRON | MEGATRON_SKIP).items())
def test_what_megatron_adds_is_refused(key, value):
    changes = {f"{ACTOR}.strategy": "megatron", key: value}
    assert refused(SKIP, **changes) == {key}
    assert refused(OWN, **changes) == ({key} if key in MEGATRON else set())


def test_a_refusal_says_what_the_key_must_be_as_yaml_writes_it():
    found = PLUGIN.fuse_validate(config=composed(SKIP, **{"fuse.pipeline.enabled": True}))
    assert list(map(str, found)) == ["fuse.pipeline.enabled=true: fuse.update.skip_zero_gradient=true needs false"]
    found = PLUGIN.fuse_validate(config=composed(OWN, **{"algorithm.rollout_correction.rollout_is": "token"}))
    assert list(map(str, found)) == [
        "algorithm.rollout_correction.rollout_is='token': fuse.update.skip_old_log_prob=true needs null"
    ]


def test_values_without_a_critic_are_refused_for_each_key_that_leaves_it_out():
    critic = {"critic.strategy": "fsdp2", "critic.ppo_mini_batch_size": 8}
    values = "fuse.update.skip_values"
    assert refused(values, **critic, **{"algorithm.adv_estimator": "gae"}) == set()
    assert refused(values, **critic, **{"algorithm.adv_estimator": "gae", "critic.enable": False}) == {"critic.enable"}
    assert refused(values, **critic, **{"critic.enable": False}) == {"algorithm.adv_estimator", "critic.enable"}
    assert refused(values, **critic, **{"critic.enable": True}) == {"algorithm.adv_estimator"}


STREAM, VALUES, RESPONSES = "fuse.update.stream", "fuse.update.skip_values", "fuse.update.response_logits"
SHARE = "fuse.update.share_prompts"


# Ray warns when verl is imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "switches", "changed"),
    [
        ("actor", (SKIP,), "init_model"),
        ("actor", (OWN, STREAM), "stream_rows"),
        ("actor", (RESPONSES,), "init_model"),
        ("actor", (SHARE,), "take_tokens"),
        ("actor", (OWN, RESPONSES, SHARE), "shares_prompts"),
        ("actor", (OWN, STREAM, RESPONSES), "stream_rows"),
        ("critic", (VALUES,), "train_batch"),
    ],
)
def test_updates_go_on_top_of_another_plugins_workers(model, switches, changed):
    pytest.importorskip("verl")

    class Worker:
        def init_model(self): ...

        def reset(self): ...

    class Other(Worker): ...

    class Stranger:
        @hookimpl
        def fuse_worker_class(self, model, base):
            return Other if base is Worker else None

    manager = plugins.load()
    manager.register(Stranger())
    found = manager.hook.fuse_worker_class(model=model, base=Worker, config=composed(*switches))
    assert found.__mro__[-3:-1] == (Other, Worker)
    assert getattr(found, changed) is not getattr(Worker, changed, None)
    other = "actor" if model == "critic" else "critic"
    assert manager.hook.fuse_worker_class(model=other, base=Worker, config=composed(*switches)) is Other


# Ray warns when verl is imported.
@pytest.mark.filterwarnings("ignore")
def test_a_critic_on_the_actors_devices_computes_prompts_once():
    pytest.importorskip("verl")

    class Worker:
        def reset(self): ...

    def made(*switches, **changes):
        config = composed(SHARE, *switches, **WITH_CRITIC | changes)
        return plugins.load().hook.fuse_worker_class(model="critic", base=Worker, config=config)

    assert made().take_tokens
    both = made(VALUES)
    assert both.take_tokens
    assert both.values_of_update
    names = [kind.__name__ for kind in both.__mro__]
    assert names[:2] == ["OwnValuesSharedPromptsWorker", "SharedPromptsWorker"]
    norm = {"critic.loss_agg_mode": "seq-mean-token-sum-norm"}
    assert made(**norm, **{"critic.loss_scale_factor": 64}).take_tokens
    for apart in (
        {"fuse.placement.critic": "auto"},
        norm,
        {"critic.fsdp.qat.enable": True},
        {"critic.model.use_liger": True},
    ):
        assert made(**apart) is None
    assert made(**{"algorithm.adv_estimator": "grpo"}) is None


# Ray warns when verl is imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("switches", [(SKIP,), (OWN,), (SKIP, OWN)])
def test_workers_leave_out_what_is_switched_on(monkeypatch, switches):
    pytest.importorskip("verl")
    asked = []
    for module, name in (("lean", "lean_worker_class"), ("stream", "stream_worker_class")):
        target = f"verl_fuse_update.{module}.worker.{name}"
        monkeypatch.setattr(target, lambda base, options: asked.append(options) or base)
    hook = plugins.load().hook
    hook.fuse_worker_class(model="actor", base=object, config=composed(*switches))
    hook.fuse_worker_class(model="actor", base=object, config=composed(*switches, STREAM))
    assert [(one.skip_zero_gradient, one.skip_old_log_prob) for one in asked] == [
        (SKIP in switches, OWN in switches)
    ] * 2


@pytest.mark.parametrize(
    ("metrics", "loss", "short"),
    [
        ("computed", "vanilla", True),
        ("computed", "gspo", True),
        ("computed", "dro", False),
        ("stock", "vanilla", False),
    ],
)
def test_the_pass_is_shorter_where_no_metric_and_no_loss_needs_it(metrics, loss, short):
    config = composed(OWN, **{f"{ACTOR}.policy_loss.loss_mode": loss})
    found = parts_of(config, UpdateConfig(skip_old_log_prob=True, metrics=metrics))
    options = LeanOptions(False, True, metrics, bypass=False, short_pass=short)
    assert found == {"lean": {"options": options, "balance": False, "share": False}}


@pytest.mark.parametrize("bypass", [True, False, None])
def test_an_update_knows_whose_old_log_probs_it_has(bypass):
    changes = {} if bypass is None else {"algorithm.rollout_correction.bypass_mode": bypass}
    found = parts_of(composed(SKIP, **changes), UpdateConfig(skip_zero_gradient=True, metrics="computed"))
    assert found["lean"]["options"] == LeanOptions(True, False, "computed", bool(bypass), short_pass=True)


BALANCE = "fuse.update.balance"
WITH_CRITIC = {
    "algorithm.adv_estimator": "gae",
    "critic.strategy": "fsdp2",
    "critic.ppo_mini_batch_size": 2,
    f"{ACTOR}.ppo_mini_batch_size": 2,
}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "megatron"])
def test_balance_goes_with_penalties_any_number_of_mini_batches_and_a_critic(strategy):
    penalties = {
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.entropy_coeff": 0.01,
        f"{ACTOR}.ppo_epochs": 2,
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.model.lora_rank": 8,
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
    }
    engines = {f"{ACTOR}.strategy": strategy, "critic.strategy": strategy}
    for loss in BALANCED_LOSSES:
        assert refused(BALANCE, **WITH_CRITIC | engines | penalties | {f"{ACTOR}.policy_loss.loss_mode": loss}) == set()
    assert refused(BALANCE, SKIP) == set()


@pytest.mark.parametrize(
    ("key", "value", "of_critic"),
    [
        ("trainer.v1.trainer_mode", "sync", False),
        (f"{ACTOR}.strategy", "veomni", False),
        (f"{ACTOR}.shuffle", True, False),
        (f"{ACTOR}.policy_loss.loss_mode", "geo_mean", False),
        (f"{ACTOR}.fsdp_config.qat.enable", True, False),
        ("actor_rollout_ref.model.mtp.enable", True, False),
        ("actor_rollout_ref.model.lora.dropout", 0.1, False),
        ("algorithm.rollout_correction.rollout_is_batch_normalize", True, False),
        ("fuse.pipeline.enabled", True, False),
        ("distillation.enabled", True, False),
        ("critic.strategy", "veomni", True),
        ("critic.shuffle", True, True),
        ("critic.fsdp.qat.enable", True, True),
        ("critic.model.override_config.attention_dropout", 0.1, True),
    ],
)
def test_what_balance_does_not_go_with_is_refused(key, value, of_critic):
    assert refused(BALANCE, **WITH_CRITIC | {key: value}) == {key}
    assert refused(BALANCE, **{key: value}) == (set() if of_critic else {key})
    assert refused(**{key: value}) == set()


@pytest.mark.parametrize(
    ("name", "value"), [("moe_aux_loss_coeff", 0.01), ("moe_router_enable_expert_bias", True), ("fp8", "hybrid")]
)
def test_what_megatron_makes_of_a_micro_batch_is_refused_with_balance(name, value):
    key = f"{TRANSFORMER}.{name}"
    assert refused(BALANCE, **{f"{ACTOR}.strategy": "megatron", key: value}) == {key}
    assert refused(BALANCE, **{f"{ACTOR}.strategy": "fsdp2", key: value}) == set()


def test_drawn_mini_batches_unlock_balance_where_they_are_not():
    (found,) = PLUGIN.fuse_validate(config=composed(BALANCE, **{f"{ACTOR}.shuffle": True}))
    assert found.unlock == {f"{ACTOR}.shuffle": False}
    mode = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}
    (found,) = PLUGIN.fuse_validate(config=composed(BALANCE, **mode))
    assert found.allowed.startswith(f"{BALANCE}=true needs a number")


def test_balance_asks_for_its_losses_and_for_how_verl_cuts():
    asked = PLUGIN.fuse_contracts(config=composed(BALANCE))
    targets = {one.target.rpartition(":")[2] for one in asked if isinstance(one, Function | Name)}
    assert {"calculate_workload", "make_iterator", "compute_policy_loss_vanilla"} <= targets
    assert set(asked) < set(PLUGIN.fuse_contracts(config=None))


@pytest.mark.parametrize(
    ("switches", "changes", "can", "balanced", "shared"),
    [
        ((), {}, (), ["actor"], None),
        ((), WITH_CRITIC, (), ["actor", "critic"], None),
        ((SHARE,), WITH_CRITIC, ("actor", "critic"), [], (["actor", "critic"], ["actor", "critic"])),
        # A model that cannot share is balanced.
        ((SHARE,), WITH_CRITIC, ("actor",), ["critic"], (["actor"], ["actor"])),
        ((SHARE,), WITH_CRITIC, (), ["actor", "critic"], None),
        ((SHARE,), WITH_CRITIC | {"fuse.placement.critic": "auto"}, ("actor", "critic"), ["critic"], (["actor"],) * 2),
        ((SHARE,), {}, ("actor", "critic"), [], (["actor"], ["actor"])),
        ((SHARE, SKIP), WITH_CRITIC, ("actor", "critic"), [], (["actor", "critic"], ["critic"])),
        ((SKIP,), WITH_CRITIC, (), ["critic"], None),
        ((VALUES,), WITH_CRITIC, (), ["actor", "critic"], None),
        ((OWN,), {}, (), [], None),
    ],
)
def test_each_update_is_placed_once(switches, changes, can, balanced, shared):
    switched = {key.rpartition(".")[2]: True for key in (BALANCE, *switches)}
    config = {key: True for key in (BALANCE, *switches)} | changes
    found = parts_of(config, UpdateConfig(**switched), can)
    assert found["balanced"] == {"models": balanced}
    expected = None if shared is None else dict(zip(("models", "places"), shared, strict=True)) | {"balance": True}
    assert found.get("shared") == expected
    assert ("own_values" in found) == (VALUES in switches)
    assert ("lean" in found) == bool({SKIP, OWN} & set(switches))
    if lean := found.get("lean"):
        assert lean["share"] is bool(shared and "actor" in shared[0])


DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": True, "trainer.n_gpus_per_node": 8}
MANY = {f"{ACTOR}.ppo_mini_batch_size": 2}
PADDED = {"actor_rollout_ref.model.use_remove_padding": False, f"{ACTOR}.use_dynamic_bsz": False}
PACKED = PADDED | {"actor_rollout_ref.model.use_remove_padding": True}


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        (DYNAMIC, "verl balances the one mini-batch of a step over ranks itself"),
        (DYNAMIC | MANY, None),
        (DYNAMIC | MANY | {"trainer.n_gpus_per_node": 1}, "there is one rank"),
        (DYNAMIC | MANY | {"trainer.n_gpus_per_node": 1, "trainer.nnodes": 2}, None),
        (DYNAMIC | WITH_CRITIC | {f"{ACTOR}.ppo_mini_batch_size": 8}, None),
        (DYNAMIC | PADDED, None),
        (DYNAMIC | PADDED | {"trainer.n_gpus_per_node": 1}, None),
        (DYNAMIC | PACKED, None),
        (DYNAMIC | PACKED | {"trainer.n_gpus_per_node": 1}, "there is one rank"),
    ],
)
def test_balance_is_idle_where_verl_leaves_nothing_to_balance(changes, idle):
    (feature,) = (one for one in PLUGIN.fuse_features() if one.name == "balance")
    assert feature.idle(getter(composed(**changes))) == idle


# A critic that is updated with values of its own.
CRITIC = {"algorithm.adv_estimator": "gae", "critic.strategy": "fsdp2", "critic.ppo_mini_batch_size": 8}


def test_own_values_fit_any_mini_batches_of_either_engine():
    several = {"critic.ppo_mini_batch_size": 4, "critic.ppo_epochs": 2}
    for strategy in ("fsdp", "fsdp2", "megatron"):
        for changes in ({}, several):
            assert refused(VALUES, **CRITIC | {"critic.strategy": strategy} | changes) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("algorithm.adv_estimator", "grpo"),
        ("algorithm.use_pf_ppo", True),
        ("algorithm.rollout_correction.rollout_rs", "token_k1"),
        ("critic.enable", False),
        ("critic.strategy", "veomni"),
        ("critic.shuffle", True),
        ("critic.fsdp.qat.enable", True),
        ("critic.model.override_config.attention_dropout", 0.1),
        ("fuse.pipeline.enabled", True),
        ("fuse.placement.critic", {"first": 0, "devices": 1}),
    ],
)
def test_what_own_values_do_not_go_with_is_refused(key, value):
    assert refused(VALUES, **CRITIC | {key: value}) == {key}


FITS_RESPONSES: dict[str, Any] = {
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.entropy_coeff": 0.01,
    f"{ACTOR}.ppo_mini_batch_size": 2,
    f"{ACTOR}.ppo_epochs": 2,
    f"{ACTOR}.policy_loss.loss_mode": "clip_cov",
    f"{ACTOR}.ulysses_sequence_parallel_size": 2,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.lora_rank": 8,
    "algorithm.use_kl_in_reward": True,
    "algorithm.rollout_correction.rollout_is": "token",
    "trainer.device": "cuda",
}


def test_logits_of_responses_go_with_any_loss_and_any_number_of_mini_batches():
    assert refused(RESPONSES, **FITS_RESPONSES) == set()
    for key, value in FITS_RESPONSES.items():
        assert refused(RESPONSES, **{key: value}) == set()
    assert refused(RESPONSES, SKIP, OWN) == set()


@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [
        ("trainer.v1.trainer_mode", "sync", "trainer.v1.trainer_mode=fuse"),
        (f"{ACTOR}.strategy", "megatron", "fsdp or fsdp2"),
        (f"{ACTOR}.strategy", "veomni", "fsdp or fsdp2"),
        ("trainer.device", "npu", "cuda or cpu"),
        ("distillation.enabled", True, "false"),
        (
            "actor_rollout_ref.model.use_fused_kernels",
            True,
            "false: fused kernels make log-probs without logits, and without their memory",
        ),
        ("actor_rollout_ref.model.use_liger", True, "false"),
        ("actor_rollout_ref.model.mtp.enable", True, "false"),
        (f"{ACTOR}.fsdp_config.qat.enable", True, "false"),
    ],
)
def test_what_logits_of_responses_do_not_go_with_is_refused(key, value, needs):
    (found,) = PLUGIN.fuse_validate(config=composed(RESPONSES, **{key: value}))
    assert (found.key, found.value) == (key, value)
    assert found.allowed.startswith(f"{RESPONSES}=true needs {needs}")
    assert refused(**{key: value}) == set()


def test_a_model_that_reads_images_is_refused_where_its_folder_is_here(tmp_path: Path):
    model = {"actor_rollout_ref.model.path": str(tmp_path)}
    assert refused(RESPONSES, **model) == set(), "the workers look"
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3"}')
    assert refused(RESPONSES, **model) == set()
    config.write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    (found,) = PLUGIN.fuse_validate(config=composed(RESPONSES, **model))
    assert found.allowed == f"{RESPONSES}=true needs a model of text alone: its config.json has vision_config"
    config.write_text("[]")
    (found,) = PLUGIN.fuse_validate(config=composed(RESPONSES, **model))
    assert found.allowed.startswith(f"{RESPONSES}=true needs a config.json that can be read: ")
    assert refused(**model) == set()


@pytest.mark.parametrize(
    ("config", "skip", "own"),
    [
        ('{"model_type": "qwen3", "attention_dropout": 0.0}', True, True),
        # A tower that no sample reaches has no gradients in verl.
        ('{"model_type": "qwen3_5", "vision_config": {}}', False, True),
        ('{"model_type": "llama", "attention_dropout": 0.1}', False, False),
        ('{"model_type": "mixtral", "router_jitter_noise": 0.01}', False, False),
    ],
)
def test_what_a_model_s_own_configuration_says_is_known_before_start(tmp_path: Path, monkeypatch, config, skip, own):
    """From its folder, or from the hub's cache: a preset must not end a run for it after the workers are built."""
    (tmp_path / "config.json").write_text(config)
    snapshot = tmp_path / "hub/models--Some--Model-7B/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(config)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    key = "actor_rollout_ref.model.path"
    for path in (str(tmp_path), "Some/Model-7B"):
        assert refused(SKIP, **{key: path}) == (set() if skip else {key})
        assert refused(OWN, **{key: path}) == (set() if own else {key})
        assert refused(**{key: path}) == set()
    assert refused(SKIP, OWN, **{key: "Some/Other-7B"}) == set(), "the workers look"
    block = "actor_rollout_ref.model.override_config"
    off = {f"{block}.attention_dropout": 0.0, f"{block}.router_jitter_noise": 0.0}
    assert refused(OWN, **{key: str(tmp_path), **off}) == set()


@pytest.mark.parametrize(
    ("content", "fits"),
    [(None, True), ('{"lora_dropout": 0.0}', True), ('{"lora_dropout": 0.05}', False), ("{", True), ("{}", True)],
)
def test_an_adapter_with_dropout_of_its_own_is_known_before_start(tmp_path: Path, content: str | None, fits: bool):
    """verl loads it with its own configuration."""
    key = "actor_rollout_ref.model.lora_adapter_path"
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    for switch in (SKIP, OWN):
        assert refused(switch, **{key: str(tmp_path)}) == (set() if fits else {key})
    assert refused(BALANCE, **{key: str(tmp_path)}) == refused(**{key: str(tmp_path)}) == set()


def test_a_critic_that_drops_something_is_refused_with_its_own_values(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_dropout": 0.1}')
    key = "critic.model.path"
    assert refused(VALUES, **WITH_CRITIC | {key: str(tmp_path)}) == {key}
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_dropout": 0.0}')
    assert refused(VALUES, **WITH_CRITIC | {key: str(tmp_path)}) == set()


def test_a_critic_s_loss_by_a_micro_batch_s_longest_response_is_refused_with_balance():
    norm = {"critic.loss_agg_mode": "seq-mean-token-sum-norm", "critic.loss_scale_factor": None}
    assert refused(BALANCE, **WITH_CRITIC | norm) == {"critic.loss_scale_factor"}
    assert refused(BALANCE, **WITH_CRITIC | norm | {"critic.loss_scale_factor": 100}) == set()
    assert refused(BALANCE, **norm) == set()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", False),
        ("Qwen3-Omni-30B", False),
        ("OpenGVLab/InternVL3-8B", False),
        ("Qwen/Qwen2.5-7B-Instruct", True),
        ("someone/Marvland-7B", True),
        ("/gone/vision-team/Qwen3-8B", True),
        ("~nobody-of-this-name/Qwen3-8B", True),
    ],
)
def test_models_that_are_not_here_are_known_by_name(name: str, text: bool):
    assert refused(RESPONSES, **{"actor_rollout_ref.model.path": name}) == (
        set() if text else {"actor_rollout_ref.model.path"}
    )


# Ray warns when verl is imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("preset", "strict"), [(None, True), ("observe", True), ("safe", False), ("fast", False)])
def test_with_a_preset_a_model_that_cannot_is_left_as_it_is(monkeypatch, preset, strict):
    pytest.importorskip("verl")
    asked = []
    target = "verl_fuse.host.inference.response_logits.response_logits_worker_class"
    monkeypatch.setattr(target, lambda base, strict: asked.append(strict) or base)
    config = composed(RESPONSES, **{} if preset is None else {"fuse.preset": preset})
    plugins.load().hook.fuse_worker_class(model="actor", base=object, config=config)
    assert asked == [strict]


def test_logits_of_responses_ask_for_what_reads_them():
    asked = PLUGIN.fuse_contracts(config=composed(RESPONSES))
    targets = {one.target.rpartition(".")[2] for one in asked if isinstance(one, Function | Name)}
    assert {"prepare_model_inputs", "prepare_model_outputs", "_gather_and_unpad_packed"} <= targets
    assert not any(one.exact for one in asked if isinstance(one, Function | Name)), "any loss"
    both = PLUGIN.fuse_contracts(config=composed(RESPONSES, SKIP))
    assert set(asked) < set(both)
    assert len(set(both)) == len(both)


REF = "actor_rollout_ref.ref"


def test_prompts_computed_once_go_with_penalties_adapters_and_any_number_of_mini_batches():
    fits = {
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.entropy_coeff": 0.01,
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.ppo_mini_batch_size": 1,
        f"{ACTOR}.shuffle": True,
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.model.lora_rank": 8,
        "trainer.device": "cuda",
        # The reference is the actor without its adapters.
        f"{REF}.ulysses_sequence_parallel_size": 2,
    }
    for loss in BALANCED_LOSSES:
        assert refused(SHARE, **fits | {f"{ACTOR}.policy_loss.loss_mode": loss}) == set()
    assert refused(SHARE, SKIP, OWN, RESPONSES) == set()
    assert refused(SHARE, BALANCE) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("trainer.device", "npu"),
        (f"{ACTOR}.strategy", "megatron"),
        (f"{ACTOR}.policy_loss.loss_mode", "geo_mean"),
        (f"{ACTOR}.ulysses_sequence_parallel_size", 2),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2),
        (f"{ACTOR}.fsdp_config.pad_to_length", True),
        (f"{REF}.ulysses_sequence_parallel_size", 2),
        (f"{REF}.fsdp_config.pad_to_length", True),
        ("actor_rollout_ref.model.use_fused_kernels", True),
        ("actor_rollout_ref.model.use_liger", True),
        ("actor_rollout_ref.model.lora.dropout", 0.1),
        ("actor_rollout_ref.model.override_config.attention_dropout", 0.1),
        ("distillation.enabled", True),
        ("fuse.pipeline.enabled", True),
        ("actor_rollout_ref.model.path", "Qwen/Qwen2.5-VL-7B-Instruct"),
    ],
)
def test_what_prompts_computed_once_do_not_go_with_is_refused(key, value):
    found = PLUGIN.fuse_validate(config=composed(SHARE, **{f"{ACTOR}.use_kl_loss": True, key: value}))
    assert [(one.key, one.value) for one in found] == [(key, value)]
    assert refused(**{key: value}) == set()


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flash_attention_2", "flash_attention_3", None])
def test_accelerators_need_flash_attention_for_it(kernel):
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    changes = {} if kernel is None else {key: kernel}
    assert refused(SHARE, **changes, **{"trainer.device": "cpu"}) == set()
    flash = kernel is None or kernel.startswith("flash")
    assert refused(SHARE, **changes, **{"trainer.device": "cuda"}) == (set() if flash else {key})


@pytest.mark.parametrize(
    ("samples", "prompt", "response", "reason"),
    [
        (1, 4096, 1024, "each prompt has one sample"),
        (8, 127, 1024, "prompts have less than an 8th of the tokens of responses"),
        (8, 128, 1024, None),
        (2, 4096, 1024, None),
    ],
)
def test_a_preset_leaves_prompts_alone_that_there_is_little_of(samples, prompt, response, reason):
    changes = {
        "actor_rollout_ref.rollout.n": samples,
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
    }
    (feature,) = [one for one in FEATURES if one.name == "share_prompts"]
    assert feature.idle(getter(composed(**changes))) == reason


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({}, True),
        ({"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2}, False),
        ({f"{ACTOR}.use_dynamic_bsz": True}, False),
        ({f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2}, False),
        (WITH_CRITIC, False),
    ],
)
def test_a_preset_leaves_prompts_alone_where_each_row_is_computed_by_itself(changes, alone):
    sizes = (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    )
    limits = {"actor_rollout_ref.rollout.n": 8, "data.max_prompt_length": 512, "data.max_response_length": 1024}
    padded = {f"{ACTOR}.use_dynamic_bsz": False, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": False}
    (feature,) = [one for one in FEATURES if one.name == "share_prompts"]
    get = getter(composed(**limits | padded | dict.fromkeys(sizes, 1) | changes))
    assert feature.idle(get) == ("micro-batches have one row each" if alone else None)


def test_prompts_computed_once_ask_for_what_reads_their_rows():
    asked = PLUGIN.fuse_contracts(config=composed(SHARE))
    targets = {one.target.rpartition(".")[2] for one in asked if isinstance(one, Function | Name)}
    assert {"prepare_model_inputs", "forward_backward_batch", "calculate_workload", "make_iterator"} <= {
        target.rpartition(":")[2] for target in targets
    }
    assert set(asked) < set(PLUGIN.fuse_contracts(config=None))


def test_a_sum_over_the_longest_response_needs_a_scale():
    mode = {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}
    assert refused(SKIP, **mode) == refused(SHARE, **mode) == {f"{ACTOR}.loss_scale_factor"}
    assert refused(SKIP, **mode, **{f"{ACTOR}.loss_scale_factor": 100}) == set()


def test_a_run_asks_for_the_loss_it_trains_by():
    for loss, function in ANY_LOSSES.items():
        switch = SKIP if loss in ROW_LOSSES else OWN
        asked = PLUGIN.fuse_contracts(config=composed(switch, **{f"{ACTOR}.policy_loss.loss_mode": loss}))
        losses = [one for one in asked if getattr(one, "exact", False)]
        assert [one.target.partition(":")[2] for one in losses] == [function]
