"""`fuse.preset`: what is switched on, what wins over it, and what it says."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.cost.drafter import FIGURES
from verl_fuse.errors import FuseError
from verl_fuse.feature import Feature
from verl_fuse.host.start.preset import choose, unlocked
from verl_fuse.host.start.settings import Settings, load_settings
from verl_fuse.spec.composed import getter
from verl_fuse.spec.step import Refusal

ON = "fuse.preset=fast: fuse."


@pytest.fixture
def base(repo):
    """A GRPO run on two replicas of accelerators that no feature refuses."""
    shipped = OmegaConf.load(repo / "verl_fuse/host/config/fuse/default.yaml")
    model = {"strategy": "fsdp2", "fsdp_config": {}}
    run = {
        "trainer": {
            "v1": {"trainer_mode": "fuse"},
            "device": "cuda",
            "default_local_dir": "run",
            "nnodes": 1,
            "n_gpus_per_node": 2,
        },
        "algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": False}},
        "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
        "data": {"train_batch_size": 8},
        "critic": {"strategy": "fsdp2"},
        "actor_rollout_ref": {
            "hybrid_engine": True,
            "actor": {**model, "ppo_mini_batch_size": 8, "ppo_epochs": 1, "policy_loss": {"loss_mode": "vanilla"}},
            "ref": model,
            "rollout": {"name": "vllm", "n": 8, "free_cache_engine": True, "tensor_model_parallel_size": 1},
        },
    }
    return OmegaConf.create({**run, "fuse": shipped.fuse})


@pytest.fixture
def host(base, monkeypatch):
    """The same run on the host."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    rollout = {"enable_sleep_mode": False, "free_cache_engine": False}
    attention = {"override_config": {"attn_implementation": "sdpa"}}
    changes = {
        "trainer": {"device": "cpu"},
        "ray_kwargs": {"ray_init": {"num_gpus": 2}},
        "actor_rollout_ref": {"rollout": rollout, "model": attention},
        "critic": {"model": attention},
    }
    return OmegaConf.merge(base, changes)


def loaded(base, preset: str, **keys) -> tuple[Settings, dict]:
    """The settings, and the features that are on."""
    config = OmegaConf.merge(base, {"fuse": {"preset": preset}})
    for key, value in keys.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    settings = load_settings(config)
    blocks = settings.blocks
    on = {name for name in ("interstage", "elastic", "pipeline", "speculation") if blocks[name].enabled}
    on |= {
        name
        for name in ("skip_zero_gradient", "skip_old_log_prob", "skip_values", "response_logits")
        if getattr(blocks["update"], name)
    }
    # What plugins read in the configuration itself is the same.
    assert {
        name: config.fuse[name].get("enabled") for name in ("interstage", "elastic", "pipeline", "speculation")
    } == {name: name in on for name in ("interstage", "elastic", "pipeline", "speculation")}
    return settings, {"on": on, "metrics": blocks["update"].metrics, "layout": blocks["interstage"].layout}


def test_observe_switches_nothing_on_and_says_nothing(base):
    settings, found = loaded(base, "observe")
    assert found == {"on": set(), "metrics": "stock", "layout": "shared"}
    assert settings.blocks["realloc"].weight_sync == "stock"
    assert settings.chosen == settings.idle == ()


def test_safe_changes_nothing_in_the_engines(base):
    settings, found = loaded(base, "safe")
    updates = {"skip_zero_gradient", "skip_old_log_prob", "response_logits"}
    assert found == {"on": updates | {"elastic"}, "metrics": "stock", "layout": "shared"}
    assert settings.idle == ()


def test_fast_without_a_critic_or_reference_has_nothing_to_stream(host):
    settings, found = loaded(host, "fast")
    updates = {"skip_zero_gradient", "skip_old_log_prob", "response_logits"}
    assert found == {"on": updates | {"elastic", "speculation"}, "metrics": "computed", "layout": "shared"}
    said = "\n".join(settings.chosen)
    for update in ("skip_zero_gradient", "skip_old_log_prob"):
        assert f"{ON}update.{update}=true fuse.update.metrics=computed" in settings.chosen
    assert (
        "without interstage.enabled: there is neither an old log-prob pass, nor a reference, nor a pass for values"
        in said
    )
    assert "without pipeline.enabled: there is no critic" in said


@pytest.mark.parametrize("preset", ["safe", "fast"])
def test_a_critic_computes_values_in_its_update_unless_slices_do(base, preset):
    critic = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True}
    _, found = loaded(base, preset, **critic, critic__ppo_mini_batch_size=8)
    assert "skip_values" in found["on"]
    settings, found = loaded(base, preset, **critic, critic__ppo_mini_batch_size=4)
    assert ("skip_values" in found["on"]) == (preset == "safe")
    said = "without update.skip_values: with fuse.interstage values are computed while other samples generate"
    assert (said in "\n".join(settings.chosen)) == (preset == "fast")


def test_fast_streams_to_a_critic_and_says_what_refuses_the_rest(host):
    settings, found = loaded(host, "fast", algorithm__adv_estimator="gae", algorithm__use_kl_in_reward=True)
    assert found["on"] == {"interstage", "elastic", "speculation", "response_logits"}
    assert found["layout"] == "slices"
    assert settings.blocks["interstage"].migration_threshold == "auto"
    said = "\n".join(settings.chosen)
    assert "without update.skip_zero_gradient: a critic's advantages are hardly ever 0" in said
    assert "without update.skip_old_log_prob: algorithm.use_kl_in_reward=true" in said


def test_slices_compute_old_log_probs_of_several_mini_batches_where_there_are_any(base):
    several = {"actor_rollout_ref__actor__ppo_mini_batch_size": 4, "actor_rollout_ref__actor__ppo_epochs": 2}
    settings, found = loaded(base, "fast", **several)
    assert {"interstage", "skip_old_log_prob"} & found["on"] == {"interstage"}
    without = "without update.skip_old_log_prob: with fuse.interstage"
    assert any(without in line for line in settings.chosen)
    for one in ({"fuse__interstage__enabled": False}, {"trainer__n_gpus_per_node": 1}):
        _, found = loaded(base, "fast", **several, **one)
        assert {"interstage", "skip_old_log_prob"} & found["on"] == {"skip_old_log_prob"}
    _, found = loaded(base, "safe", **several)
    assert "skip_old_log_prob" in found["on"]


def test_every_refusal_of_a_feature_is_told_in_one_line_of_the_preset(base):
    settings, _ = loaded(
        base, "fast", algorithm__adv_estimator="gae", actor_rollout_ref__actor__fsdp_config__qat__enable=True
    )
    (said,) = [line for line in settings.chosen if "without pipeline.enabled" in line]
    first, *reasons = said.split("\n  - ")
    assert first == "fuse.preset=fast: without pipeline.enabled: 3 problems:"
    assert [reason.partition(":")[0] for reason in reasons] == [
        "fuse.pipeline.enabled=true",
        "actor_rollout_ref.actor.strategy='fsdp2'",
        "critic.strategy='fsdp2'",
    ]
    (said,) = [line for line in settings.chosen if "without update.skip_old_log_prob" in line]
    assert said == (
        "fuse.preset=fast: without update.skip_old_log_prob: actor_rollout_ref.actor.fsdp_config.qat.enable=true: "
        "fuse.update.skip_old_log_prob=true needs false"
    )


def test_on_accelerators_fast_leaves_out_speculation_and_says_what_was_measured(base):
    settings, found = loaded(base, "fast", trainer__device="cuda")
    assert found["on"] == {"skip_zero_gradient", "skip_old_log_prob", "response_logits", "elastic"}
    assert (
        f"fuse.preset=fast: without speculation.enabled: {FIGURES}; fuse.speculation.enabled=true switches it on "
        in ("\n".join(settings.chosen))
    )
    assert settings.slower == ()


@pytest.mark.parametrize("preset", ["observe", "safe", "fast"])
def test_speculation_that_is_asked_for_on_accelerators_runs_and_warns_with_the_figures(base, preset):
    settings, found = loaded(base, preset, fuse__speculation__enabled=True)
    assert "speculation" in found["on"]
    assert f"warning: fuse.speculation.enabled=true: {FIGURES}" in settings.notes


@pytest.mark.parametrize("preset", ["observe", "safe", "fast"])
def test_on_the_host_speculation_has_no_warning(host, preset):
    settings, found = loaded(host, preset, fuse__speculation__enabled=True)
    assert "speculation" in found["on"]
    assert settings.slower == ()


def test_a_refusal_of_what_is_slower_is_told_in_place_of_how_to_switch_it_on(base):
    settings, found = loaded(base, "fast", actor_rollout_ref__rollout__name="sglang")
    assert "speculation" not in found["on"]
    (said,) = [line for line in settings.chosen if "without speculation.enabled" in line]
    assert said.startswith("fuse.preset=fast: without speculation.enabled: actor_rollout_ref.rollout.name='sglang': ")
    assert "switches it on" not in said


@pytest.mark.parametrize(
    ("keys", "on"),
    [
        ({"fuse__elastic__scale": True}, {"elastic"}),
        ({"fuse__elastic__release": True}, {"elastic"}),
        (
            {
                "fuse__update__stream": True,
                "fuse__elastic__release": True,
                "actor_rollout_ref__actor__fsdp_config__fsdp_size": 1,
            },
            {"elastic"},
        ),
    ],
)
def test_a_feature_that_others_leave_without_work_keeps_nothing_out(base, keys, on):
    """Slices are tried before the updates that leave them nothing to infer, and not beside the keys that are set."""
    settings, found = loaded(base, "fast", **keys)
    assert found["on"] == {"skip_zero_gradient", "skip_old_log_prob", "response_logits"} | on
    assert any("interstage.enabled: there is neither an old log-prob pass" in line for line in settings.chosen)
    assert not any("interstage.migration_threshold" in line for line in settings.chosen)
    assert settings.idle == ()


def test_of_two_values_of_a_key_the_larger_gain_s_wins(base):
    features = [
        Feature("one", {"update.skip_zero_gradient": True}, {"fast": {"update.metrics": "computed"}}, measured=1.1),
        Feature("two", {"update.skip_old_log_prob": True}, {"fast": {"update.metrics": "stock"}}, measured=1.2),
    ]
    before = OmegaConf.to_yaml(base)
    keys, choices = choose(base, "fast", features, lambda config: [])
    assert keys == {"update.skip_old_log_prob": True, "update.metrics": "stock"}
    assert str(choices[0]) == "fuse.preset=fast: without update.skip_zero_gradient: fuse.update.metrics=stock is chosen"
    assert OmegaConf.to_yaml(base) == before, "nothing is set by looking"


def test_single_keys_win(base):
    kept = {
        "fuse__speculation__enabled": False,
        "fuse__update__skip_old_log_prob": False,
        "fuse__update__metrics": "stock",
        "fuse__interstage__layout": "shared",
    }
    settings, found = loaded(base, "fast", **kept)
    assert found == {"on": {"skip_zero_gradient", "response_logits", "elastic"}, "metrics": "stock", "layout": "shared"}
    assert not any("speculation" in line or "old_log_prob" in line for line in settings.chosen)
    # The tail moves in slices alone, and streaming on the training workers was not shown to pay.
    assert any(
        "without interstage.enabled" in line and "needs fuse.interstage.layout=slices" in line
        for line in settings.chosen
    )


def test_one_replica_and_one_sample_leave_no_choice_between_replicas(base):
    one, found = loaded(base, "fast", trainer__n_gpus_per_node=1)
    assert "elastic" not in found["on"]
    assert any("elastic.enabled: there is one rollout replica" in line for line in one.chosen)
    two, _ = loaded(base, "fast", actor_rollout_ref__rollout__n=1)
    assert any("elastic.enabled: a prompt has one sample" in line for line in two.chosen)


def test_what_is_refused_without_the_preset_is_refused_with_it(base):
    wrong = {"fuse__speculation__enabled": True, "actor_rollout_ref__rollout__name": "sglang"}
    refusals = []
    for preset in ("observe", "fast"):
        with pytest.raises(FuseError, match=r"actor_rollout_ref.rollout.name='sglang'") as error:
            loaded(base, preset, **wrong)
        refusals.append(error.value.args)
    assert refusals[0] == refusals[1]


def test_a_plan_leaves_no_choice(base, tmp_path):
    with pytest.raises(FuseError, match=r"fuse.preset='fast': a plan .* allowed: observe"):
        loaded(base, "fast", fuse__plan=str(tmp_path / "plan.json"))
    with pytest.raises(FuseError, match=r"fuse.preset='quick': needs one of 'observe', 'safe', 'fast'"):
        loaded(base, "quick")


STRATEGY, ROWS = "actor_rollout_ref.actor.strategy", "data.train_batch_size"


@pytest.mark.parametrize(
    ("first", "then", "keys"),
    [
        # What is refused then is found once the first refusal is lifted.
        ({STRATEGY: "fsdp"}, {ROWS: 9}, {STRATEGY: "fsdp", ROWS: 9}),
        ({STRATEGY: "fsdp"}, {}, {}),
        ({STRATEGY: "megatron"}, {ROWS: 9}, {}),
        ({STRATEGY: "fsdp", "fuse.elastic.enabled": False}, {ROWS: 9}, {}),
        ({ROWS: 9}, {}, {}),
    ],
    ids=["one after the other", "no value is known", "refused in its turn", "another feature", "of no avail"],
)
def test_what_unlocks_a_feature_switches_it_on_and_nothing_else_is_refused(base, first, then, keys):
    feature = Feature("zero", {"update.skip_zero_gradient": True}, {"fast": {}})

    def problems(config):
        get = getter(config)
        found = ["megatron is refused"] if get(STRATEGY) == "megatron" else []
        if get("fuse.update.skip_zero_gradient") and get(STRATEGY) == "fsdp2":
            found.append(Refusal(STRATEGY, "fsdp2", "needs another", first))
        elif get("fuse.update.skip_zero_gradient") and get(ROWS) != 9:
            found.append(Refusal(ROWS, get(ROWS), "needs 9", then))
        return found

    _, (choice,) = choose(base, "fast", [feature], problems)
    assert choice.reasons
    assert unlocked(base, choice, [feature], problems) == keys
