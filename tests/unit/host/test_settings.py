import dataclasses

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.extras import install
from verl_fuse.host.start.settings import CoreBlock, load_settings
from verl_fuse.host.upstream.versions import problem

BASE = {
    "trainer": {"v1": {"trainer_mode": "fuse"}, "default_local_dir": "run", "device": "cuda"},
    "algorithm": {"filter_groups": {"enable": False}},
    "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
}


def config(fuse=None, **extra):
    return OmegaConf.merge(BASE, {"fuse": fuse} if fuse is not None else {}, extra)


def refusal(fuse=None, **extra) -> str:
    with pytest.raises(FuseError) as error:
        load_settings(config(fuse, **extra))
    return str(error.value)


def test_the_shipped_yaml_states_the_defaults_of_every_block(repo):
    shipped = OmegaConf.to_container(OmegaConf.load(repo / "verl_fuse/host/config/fuse/default.yaml"))["fuse"]
    blocks = plugins.config_blocks(plugins.load())
    expected = dataclasses.asdict(CoreBlock()) | {name: dataclasses.asdict(block()) for name, block in blocks.items()}
    expected["disabled_plugins"] = list(expected["disabled_plugins"])
    assert shipped == expected


def test_every_field_of_the_shipped_yaml_has_a_comment_above_it(repo):
    lines = (repo / "verl_fuse/host/config/fuse/default.yaml").read_text().split("\nfuse:\n")[1].splitlines()
    fields = [(number, line) for number, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")]
    # `enabled` is explained by the comment above its block.
    bare = [line for number, line in fields if "enabled:" not in line and not lines[number - 1].strip().startswith("#")]
    assert bare == []


def test_every_block_a_plugin_declares_is_part_of_the_configuration():
    declared = set(plugins.load().hook.fuse_config())
    assert {type(block) for block in load_settings(config()).blocks.values()} == declared


def test_a_value_that_a_check_cannot_take_is_refused_with_the_line_that_met_it():
    critic = {"critic": {"megatron": {"virtual_pipeline_model_parallel_size": "2"}}}
    said = refusal({"interstage": {"enabled": True}}, **critic)
    assert said.startswith("this configuration cannot be checked: TypeError: '>' not supported between")
    assert "(refusals.py, line " in said
    unset = refusal({"elastic": {"enabled": True}}, actor_rollout_ref={"rollout": {"name": "${oc.env:NOWHERE_SET}"}})
    assert "cannot be checked: InterpolationResolutionError" in unset
    assert "NOWHERE_SET" in unset


def test_keys_of_a_feature_that_is_off_are_named_but_not_refused():
    off = {"interstage": {"layout": "slices", "kv_transfer_params": {}}, "elastic": {"scale": True, "standalone": 2}}
    on = {"elastic": {"enabled": True, "scale": True}}
    assert sorted(load_settings(config(off)).idle) == [
        "fuse.elastic.scale=true, fuse.elastic.standalone=2: no effect while fuse.elastic.enabled=false",
        "fuse.interstage.layout='slices': no effect while fuse.interstage.enabled=false",
    ]
    assert load_settings(config(on)).idle == ()
    never = {"interstage": {"migration_threshold": 4}}
    assert load_settings(config(on | never)).idle == (
        "fuse.interstage.migration_threshold=4: no effect while fuse.interstage.enabled=false",
    )


def test_keys_that_another_key_makes_idle_are_named():
    fuse = {
        "elastic": {"enabled": True, "hysteresis": 0.2, "standalone_timeout": 60.0},
        "realloc": {"checksums": True},
        "observe": {"progress": False, "progress_interval": 5.0},
    }
    assert sorted(load_settings(config(fuse)).idle) == [
        "fuse.elastic.hysteresis=0.2: no effect while fuse.elastic.scale=false",
        "fuse.elastic.standalone_timeout=60.0: no effect while fuse.elastic.standalone=0",
        "fuse.observe.progress_interval=5.0: no effect while fuse.observe.progress=false",
        "fuse.realloc.checksums=true: no effect while fuse.realloc.weight_sync=stock",
    ]


def test_without_a_fuse_block_the_defaults_hold():
    settings = load_settings(config())
    assert settings.core == CoreBlock()
    assert settings.blocks["interstage"].enabled is False
    assert settings.run_dir.name == "run"


@pytest.mark.parametrize(
    ("fuse", "message"),
    [
        (
            {"interstag": {}},
            (
                "fuse.interstag: unknown key (did you mean 'interstage'?); allowed: call_timeout, disabled_plugins, "
                "elastic, interstage"
            ),
        ),
        ({"interstage": {"enable": True}}, "fuse.interstage.enable: unknown key (did you mean 'enabled'?)"),
        ({"interstage": {"enabled": "true"}}, "fuse.interstage.enabled='true': needs true or false"),
        ({"interstage": {"layout": "pools"}}, "fuse.interstage.layout='pools': needs one of 'shared', 'slices'"),
        (
            {"interstage": {"migration_threshold": "20%"}},
            "fuse.interstage.migration_threshold='20%': needs one of 'auto' or a whole number or a number or null",
        ),
        ({"interstage": {"migration_threshold": -1}}, "fuse.interstage.migration_threshold=-1: needs >= 0"),
        ({"replica_timeout": 0}, "fuse.replica_timeout=0.0: needs >= 1.0"),
        ({"interstage": {"micro_group": -4}}, "fuse.interstage.micro_group=-4: needs >= 1"),
        (
            {"interstage": {"start_unfinished_fraction": -0.1}},
            "start_unfinished_fraction=-0.1: needs >= 0.0 and <= 1.0",
        ),
        ({"interstage": {"max_queued": 0}}, "fuse.interstage.max_queued=0: needs >= 1"),
        ({"poll_interval": 0}, "fuse.poll_interval=0.0: needs >= 0.001 and <= 60.0"),
        ({"poll_interval": "fast"}, "fuse.poll_interval='fast': needs a number"),
        ({"stall_timeout": -1}, "fuse.stall_timeout=-1.0: needs >= 1.0"),
        ({"call_timeout": float("nan")}, "fuse.call_timeout=nan: needs >= 1.0"),
        ({"call_timeout": float("inf")}, "fuse.call_timeout=inf: needs >= 1.0 and <= 1000000000.0 and a finite number"),
        ({"elastic": {"start_seconds": float("inf")}}, "fuse.elastic.start_seconds=inf: needs >= 0.0 and a finite"),
        ({"weight_sync_timeout": 0}, "fuse.weight_sync_timeout=0.0: needs >= 1.0"),
        ({"run_dir": 7}, "fuse.run_dir=7: needs a string or null"),
        ({"observe": {"keep_steps": 0}}, "fuse.observe.keep_steps=0: needs >= 1"),
        ({"observe": {"html": "no"}}, "fuse.observe.html='no': needs true or false"),
        ({"disabled_plugins": ["interstag"]}, "interstag"),
        ({"disabled_plugins": "interstage"}, "fuse.disabled_plugins='interstage': needs a list of str"),
        (
            {"disabled_plugins": ["interstage"], "interstage": {"enabled": True}},
            "fuse.interstage.enabled=true, but fuse.disabled_plugins leaves the plugin 'interstage' out",
        ),
        ({"run_dir": "${nowhere}"}, "fuse: cannot be resolved"),
        ("on", "fuse='on': needs a block"),
    ],
)
def test_bad_values_are_refused_by_key_value_and_what_is_allowed(fuse, message):
    assert message in refusal(fuse)


STREAMING = {"interstage": {"enabled": True}}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"trainer": {"v1": {"trainer_mode": "sync"}}},
            "trainer.v1.trainer_mode='sync': fuse.interstage.enabled=true needs",
        ),
        (
            {"critic": {"megatron": {"virtual_pipeline_model_parallel_size": 2}}},
            "critic.megatron.virtual_pipeline_model_parallel_size=2: not yet with",
        ),
        ({"reward": {"reward_model": {"enable": True}}}, "reward.reward_model.enable_resource_pool=false"),
    ],
)
def test_impossible_combinations_are_refused(extra, message):
    assert message in refusal(STREAMING, **extra)


MOVING = {"interstage": {"enabled": True, "migration_threshold": 0.2}}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"name": "sglang"}, "actor_rollout_ref.rollout.name='sglang': migration needs vllm"),
        ({"full_determinism": True}, "actor_rollout_ref.rollout.full_determinism=true: migration needs false"),
        ({"disaggregation": {"enabled": True}}, "rollout.disaggregation.enabled=true: migration needs false"),
    ],
)
def test_what_cannot_migrate_is_refused_only_with_migration(rollout, message):
    extra = {"actor_rollout_ref": {"rollout": rollout}}
    assert message in refusal(MOVING, **extra)
    load_settings(config(STREAMING, **extra))


@pytest.mark.parametrize("threshold", [1.5, 2.5, 3.0])
def test_a_threshold_above_one_that_is_no_whole_number_is_refused(threshold):
    fuse = {"interstage": {"enabled": True, "migration_threshold": threshold}}
    wanted = "a fraction of the step's samples (0.0 to 1.0), a whole number of samples, auto, or null"
    assert f"fuse.interstage.migration_threshold={threshold}: {wanted}" in refusal(fuse)


def test_an_automatic_threshold_without_slices_is_refused():
    fuse = {"interstage": {"enabled": True, "migration_threshold": "auto"}}
    assert "migration_threshold='auto': auto needs fuse.interstage.layout=slices" in refusal(fuse)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"critic": {"enable": True, "strategy": "megatron"}},
            "critic.strategy='megatron': fuse.interstage.layout=slices needs fsdp or fsdp2, as the actor, or all of",
        ),
        (
            {"actor_rollout_ref": {"rollout": {"free_cache_engine": False}}},
            "actor_rollout_ref.rollout.free_cache_engine=false: fuse.interstage.layout=slices needs true",
        ),
        (
            {"actor_rollout_ref": {"model": {"lora_rank": 8}, "actor": {"strategy": "fsdp"}}},
            (
                "actor_rollout_ref.actor.strategy='fsdp': fuse.interstage.layout=slices needs fsdp2 with "
                "actor_rollout_ref.model.lora_rank=8"
            ),
        ),
    ],
)
def test_models_that_slices_cannot_copy_are_refused(extra, message):
    assert message in refusal({"interstage": {"enabled": True, "layout": "slices"}}, **extra)


def test_replicas_that_keep_their_memory_cannot_be_released():
    rollout = {"rollout": {"free_cache_engine": False}}
    block = {"enabled": True, "release": True}
    said = "actor_rollout_ref.rollout.free_cache_engine=false: fuse.elastic.release=true needs true"
    assert said in refusal({"elastic": block}, actor_rollout_ref=rollout)
    # vLLM cannot sleep on a CPU, so nothing is given back there.
    assert said not in refusal({"elastic": block}, actor_rollout_ref=rollout, trainer={"device": "cpu"})


def test_all_problems_are_listed_at_once():
    text = refusal(STREAMING, trainer={"v1": {"trainer_mode": "sync"}}, reward={"reward_model": {"enable": True}})
    assert "trainer_mode='sync'" in text
    assert "enable_resource_pool=false" in text


def test_two_bad_values_are_both_reported_with_what_the_run_lacks_besides():
    fuse = {"poll_interval": 0, "interstage": {"enabled": True, "micro_group": -1, "max_queud": 3}, "elastc": {}}
    said = refusal(fuse, trainer={"v1": {"trainer_mode": "sync"}})
    assert said.splitlines()[0] == "5 problems:"
    for expected in (
        "fuse.poll_interval=0.0: needs >= 0.001 and <= 60.0",
        "fuse.interstage.micro_group=-1: needs >= 1",
        "fuse.interstage.max_queud: unknown key (did you mean 'max_queued'?)",
        "fuse.elastc: unknown key (did you mean 'elastic'?)",
        "trainer.v1.trainer_mode='sync': fuse.interstage.enabled=true needs trainer.v1.trainer_mode=fuse",
    ):
        assert f"\n  - {expected}" in said


@pytest.mark.parametrize("found", ["0.9.1", "0.9.1.dev3", "0.9.2", "0.9.99"])
def test_supported_verl(found):
    assert problem("verl", found) is None


@pytest.mark.parametrize("found", ["0.8.0", "0.9.0", "0.10.0", "1.0"])
def test_unsupported_verl(found):
    assert problem("verl", found) == (
        f"verl {found} is not supported: verl-fuse needs verl >=0.9.1,<0.10 ({install('verl')})"
    )


def test_missing_verl_names_the_extra():
    assert problem("verl", None) == (f"verl is not installed: verl-fuse needs verl >=0.9.1,<0.10 ({install('verl')})")


@pytest.mark.parametrize(
    ("logger", "path", "lacks"),
    [
        (["console", "file"], "/runs/a/metrics.jsonl", None),
        ("file", "/runs/a/metrics.jsonl", None),
        (["console"], "/runs/a/metrics.jsonl", "file in trainer.logger"),
        (
            ["console", "file"],
            "/elsewhere.jsonl",
            "VERL_FILE_LOGGER_PATH=/runs/a/metrics.jsonl in the driver's environment",
        ),
        (
            None,
            None,
            "file in trainer.logger and VERL_FILE_LOGGER_PATH=/runs/a/metrics.jsonl in the driver's environment",
        ),
    ],
)
def test_a_run_that_cannot_be_compared_later_says_what_it_lacks(monkeypatch, logger, path, lacks):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    if path:
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", path)
    trainer = {"logger": logger, "default_local_dir": "/runs/a", "v1": {"trainer_mode": "fuse"}}
    notes = load_settings(config(trainer=trainer)).notes
    said = f"verl-fuse compare will lack the metrics of this run: needs {lacks}"
    assert notes == (() if lacks is None else (said,))
    assert load_settings(config(trainer={**trainer, "v1": {"trainer_mode": "sync"}})).notes == ()
