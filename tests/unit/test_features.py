"""Records of features: every list that was made by hand is made from them, and what excludes what is asked of the
refusals."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from typer.testing import CliRunner

from verl_fuse import plugins
from verl_fuse.advice import Gain, chosen_of
from verl_fuse.cli.group import build
from verl_fuse.cli.main import GROUPS
from verl_fuse.cli.refused import Refusals, refused
from verl_fuse.cli.simulate import require_open
from verl_fuse.errors import FuseError
from verl_fuse.feature import SWITCH, Feature
from verl_fuse.host.start.preset import choose
from verl_fuse.simulate.options import features_of

FEATURES = plugins.features(plugins.load())
NOTHING = OmegaConf.create({})
WORKLOAD = """
algorithm: grpo
prompts: 128
samples: 8
prompt: lognormal:median=100,sigma=0.3,max=256
response: lognormal:median=200,sigma=0.9,max=1024
zero_gradient: 0.9
actor: qwen2.5-7b
"""
TOY = """
from dataclasses import dataclass

from verl_fuse.feature import Feature
from verl_fuse.hookspecs import hookimpl
from verl_fuse.simulate.recorded import Saving
from verl_fuse.spec.composed import getter
from verl_fuse.spec.step import Refusal

HOOK_API = 2


@dataclass(frozen=True)
class Config:
    enabled: bool = False


@hookimpl
def fuse_config():
    return Config


@hookimpl
def fuse_features():
    keys = {"toy.enabled": True}
    presets, saving = {"fast": {}}, lambda run: Saving("how", 1.0)
    return [Feature("toy", keys, presets, measured=2.0, strategy="zero_gradient", saving=saving)]


@hookimpl
def fuse_validate(config):
    get = getter(config)
    if get("fuse.toy.enabled") and get("fuse.update.skip_zero_gradient"):
        return [Refusal("fuse.update.skip_zero_gradient", True, "fuse.toy.enabled=true needs false")]
"""


def names(pair: tuple[Feature, Feature]) -> str:
    return "-".join(one.name for one in pair)


@pytest.mark.parametrize("pair", list(combinations(FEATURES.values(), 2)), ids=names)
def test_presets_advice_and_simulator_agree_with_the_refusals_of_each_pair(pair):
    one, other = pair
    # With a preset of its own, which nothing but the other feature can keep it out of.
    alone = {line for each in pair for line in refused(NOTHING, each.overrides)}
    refusals = [line for line in refused(NOTHING, (*one.overrides, *other.overrides)) if line not in alone]
    tried = [
        replace(each, presets={"fast": {}}, idle=lambda _get: None, slower=lambda _get: None, measured=measured)
        for each, measured in zip(pair, (1.1, 1.2), strict=True)
    ]

    def beside_what_each_has_alone(config):
        return [line for line in refused(config, ()) if line not in alone]

    chosen, _ = choose(NOTHING, "fast", tried, beside_what_each_has_alone)
    both = {**one.keys, **other.keys} == chosen
    assert both is not bool(refusals)
    if refusals:
        assert chosen == other.keys, "the one with the larger gain"
    gains = [Gain(each.name, seconds, 0.5, 0.0) for each, seconds in zip(pair, (2.0, 1.0), strict=True)]
    advised = [gain.feature for gain in chosen_of(gains, FEATURES, Refusals(None).together)]
    variants = one.switch == other.switch
    assert advised == ([one.name] if refusals or variants else [one.name, other.name])
    with pytest.raises(FuseError, match=f"{one.name} and {other.name} are refused") if refusals else nullcontext():
        require_open(f"{one.name}+{other.name}", FEATURES, dict.fromkeys(FEATURES, ()))


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_a_record_names_keys_and_a_strategy_that_exist(feature: Feature):
    blocks = plugins.config_blocks(plugins.load())
    keys = {**feature.keys, **{key: value for extra in feature.presets.values() for key, value in extra.items()}}
    for plugin, _, key in (name.partition(".") for name in keys):
        assert key in blocks[plugin].__dataclass_fields__
    assert not feature.strategy or features_of(feature.strategy)
    assert not feature.beside or feature.beside in FEATURES
    assert feature.measured >= 1


def test_overrides_are_written_as_yaml():
    assert FEATURES["interstage"].overrides == (
        "fuse.interstage.enabled=true", "fuse.interstage.layout=slices", "fuse.interstage.migration_threshold=auto",
    )  # fmt: skip


@pytest.mark.parametrize("model_engine", ["fsdp", "megatron"])
def test_the_overrides_compose_with_verl_and_are_refused_where_that_is_known(model_engine: str):
    hydra = pytest.importorskip("hydra")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        megatron = (
            ["model_engine=megatron"]
            if model_engine == "megatron"
            else ["actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2"]
        )
        pipeline = [f"{role}.megatron.pipeline_model_parallel_size=2" for role in ("actor_rollout_ref.actor", "critic")]
        pipeline += ["algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.name=vllm"]
        config = hydra.compose(
            "ppo_trainer", [*megatron, *SWITCH, *(pipeline if model_engine == "megatron" else pipeline[2:])]
        )
    # verl's defaults name neither model nor micro-batches.
    alone = refused(config, ())
    # They make several mini-batches of a step.
    expected = {
        "megatron": {"stream", "placement", "response_logits", "share_prompts"},
        "fsdp": {"pipeline", "stream"},
    }[model_engine]
    for feature in FEATURES.values():
        found = set(refused(config, feature.overrides)) - set(alone)
        assert not any("unknown key" in problem for problem in found)
        assert bool(found) is (feature.name in expected), (feature.name, found)


def test_features_that_leave_each_other_nothing_to_do_are_not_advised_together():
    def config(**actor: int) -> DictConfig:
        run = {
            "trainer": {"v1": {"trainer_mode": "fuse"}, "nnodes": 1, "n_gpus_per_node": 4},
            "algorithm": {"adv_estimator": "grpo"},
            "data": {"train_batch_size": 8},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2", **actor}, "rollout": {"name": "vllm", "n": 8}},
        }
        return OmegaConf.create(run)

    one, other = FEATURES["interstage"], FEATURES["old_log_prob"]
    for size in (8, 2):
        assert Refusals(config(ppo_mini_batch_size=size)).together(one, other)
    # A reference's log-probs are left to infer beside one mini-batch.
    assert Refusals(config(ppo_mini_batch_size=8, use_kl_loss=True)).together(one, other) == ()


def test_a_feature_of_a_stranger_is_treated_alike(installed_plugin, tmp_path: Path):
    installed_plugin("toy", TOY)
    features = plugins.features(plugins.load())
    assert list(features)[-1] == "toy"
    together = Refusals(None).together
    assert together(features["toy"], features["zero_gradient"])
    assert not together(features["toy"], features["old_log_prob"])
    shipped = OmegaConf.load(Path(plugins.__file__).parent / "host/config/fuse/default.yaml").fuse
    run = {"trainer": {"v1": {"trainer_mode": "fuse"}, "default_local_dir": "run"}, "fuse": shipped}
    run |= {"actor_rollout_ref": {"actor": {"strategy": "fsdp2"}}, "algorithm": {"adv_estimator": "grpo"}}
    run["fuse"] = OmegaConf.merge(shipped, {"preset": "fast", "toy": {"enabled": None}})
    keys, choices = choose(OmegaConf.create(run), "fast", features.values(), lambda config: refused(config, ()))
    assert "fuse.preset=fast: fuse.toy.enabled=true" in map(str, choices)
    assert keys["toy.enabled"] is True
    assert "update.skip_zero_gradient" not in keys, "it gains less, and both are refused together"
    (tmp_path / "step.yaml").write_text(WORKLOAD)
    simulate = ["simulate", str(tmp_path / "step.yaml"), "h100x8", "--seeds", "2", "--json"]
    found = json.loads(CliRunner().invoke(build(GROUPS), simulate).stdout)
    seconds = {row["strategy"]: row["seconds"]["mean"] for row in found["strategies"]}
    assert seconds["toy"] == seconds["zero_gradient"] < seconds["observe"]
    assert len({"toy", "zero_gradient"} & set(found["advice"]["features"])) == 1, "they exclude each other"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            '[Feature("routing", {"toy.enabled": True})]',
            "feature 'routing': the plugin 'elastic' has a",
        ),
        ('[Feature("toy", {"toy.on": True})]', "feature 'toy': its first key needs to be one of fuse.toy"),
        ('[Feature("toy", {"update.stream": True})]', "feature 'toy': its first key needs to be one of fuse.toy"),
        ('[Feature("toy", {})]', "feature 'toy': its first key needs to be one of fuse.toy"),
        ('[Feature("toy", {"toy.enabled": True, "toy.on": 1})]', "feature 'toy': unknown key fuse.toy.on"),
        ('[Feature("toy", {"toy.enabled": True}, {"quick": {}})]', "feature 'toy': presets: quick; allowed: observe"),
        (
            '[Feature("toy", {"toy.enabled": True}, {"fast": {"elastic.x": 1}})]',
            "feature 'toy': unknown key fuse.elastic.x",
        ),
        ('[Feature("toy", {"toy.enabled": True}, strategy="mine")]', "feature 'toy': strategy='mine'; allowed: stock"),
        ('[Feature("stock", {"toy.enabled": True}, strategy="all")]', "feature 'stock': the simulator has a strategy"),
        ('[Feature("a+b", {"toy.enabled": True})]', r"feature 'a\+b': allowed names: "),
        ('["toy"]', "feature 'toy': needs to be a verl_fuse.feature.Feature"),
        ("1 / 0", "fuse_features failed: ZeroDivisionError: division by zero"),
        ("None", "fuse_features failed: TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_with_its_plugin(installed_plugin, records: str, said: str):
    start, end = TOY.index('[Feature("toy"'), TOY.index("\n\n\n@hookimpl\ndef fuse_validate")
    installed_plugin("toy", TOY[:start] + records + TOY[end:])
    with pytest.raises(FuseError, match=f"plugin 'toy': {said}"):
        plugins.features(plugins.load())


def test_a_plugin_without_a_block_has_no_features(installed_plugin):
    installed_plugin("toy", TOY.replace("@hookimpl\ndef fuse_config", "def other"))
    with pytest.raises(FuseError, match=r"plugin 'toy': feature 'toy': its first key needs to be one of fuse\.toy"):
        plugins.features(plugins.load())


def test_the_hook_is_what_the_records_come_from():
    manager = plugins.load()
    records = [feature for found in reversed(manager.hook.fuse_features()) for feature in found]
    assert records == list(plugins.features(manager).values())
