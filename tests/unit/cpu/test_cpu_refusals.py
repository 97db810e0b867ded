"""Each configuration that cannot run on the cpu platform is refused by key, value and the allowed values."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_fuse_cpu import refusals
from verl_fuse_cpu.plugin import CpuPlugin

FP32 = {"mixed_precision": {"param_dtype": "fp32"}}


@pytest.fixture(autouse=True)
def cpu_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(refusals, "SHARED_MEMORY", tmp_path)


@pytest.fixture
def config():
    """PPO with critic and reference that can run: two ranks, two replicas."""
    return OmegaConf.create(
        {
            "trainer": {"device": "cpu", "nnodes": 1, "n_gpus_per_node": 2},
            "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": False},
            "actor_rollout_ref": {
                "hybrid_engine": True,
                "model": {"path": "acme/model", "override_config": {"attn_implementation": "sdpa"}},
                "actor": {"strategy": "fsdp2", "use_kl_loss": True, "fsdp_config": FP32},
                "ref": {"strategy": "fsdp2", "fsdp_config": FP32},
                "rollout": {
                    "enable_sleep_mode": False,
                    "free_cache_engine": False,
                    "checkpoint_engine": {"update_weights_bucket_megabytes": 1},
                    "engine_kwargs": {"vllm": {"kv_cache_memory_bytes": 1 << 26}},
                },
            },
            "critic": {
                "enable": None,
                "strategy": "fsdp2",
                "fsdp": FP32,
                "model": {"path": "acme/model", "override_config": {"attn_implementation": "sdpa"}},
            },
            "ray_kwargs": {"ray_init": {"num_gpus": 2}},
        }
    )


def problems(config) -> list[str]:
    return [str(problem) for problem in CpuPlugin().fuse_validate(config) or ()]


def test_a_configuration_that_can_run_has_no_problem(config):
    assert problems(config) == []


def test_either_fsdp_can_run(config):
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        role.strategy = "fsdp"
    assert problems(config) == []


def test_other_devices_are_not_judged(config, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    config.trainer.device = "cuda"
    config.actor_rollout_ref.rollout.free_cache_engine = True
    assert CpuPlugin().fuse_validate(config) == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("trainer.device", "cuda", "trainer.device='cuda': VERL_PLATFORM=cpu needs trainer.device=cpu"),
        (
            "critic.model.override_config.attn_implementation",
            None,
            (
                "critic.model.override_config.attn_implementation=null: flash attention needs a GPU (it is verl's "
                "default); sdpa or eager"
            ),
        ),
        (
            "actor_rollout_ref.model.override_config.attn_implementation",
            "flash_attention_2",
            (
                "actor_rollout_ref.model.override_config.attn_implementation='flash_attention_2': "
                "flash attention needs a GPU (it is verl's default); sdpa or eager"
            ),
        ),
        (
            "actor_rollout_ref.ref.fsdp_config",
            {},
            (
                "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype='bf16': all roles need one precision "
                "(unset means bf16), but "
                "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32, "
                "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=bf16, "
                "critic.fsdp.mixed_precision.param_dtype=fp32"
            ),
        ),
        (
            "actor_rollout_ref.rollout.free_cache_engine",
            True,
            "actor_rollout_ref.rollout.free_cache_engine=true: vLLM cannot sleep or free its cache on a CPU: false",
        ),
        (
            "actor_rollout_ref.rollout.enable_sleep_mode",
            None,
            "actor_rollout_ref.rollout.enable_sleep_mode=null: vLLM cannot sleep or free its cache on a CPU: false",
        ),
        (
            "ray_kwargs.ray_init.num_gpus",
            None,
            (
                "ray_kwargs.ray_init.num_gpus=null: Ray must be told of at least 2 virtual devices: "
                "+ray_kwargs.ray_init.num_gpus=2"
            ),
        ),
        (
            "actor_rollout_ref",
            {"hybrid_engine": False, "rollout": {"nnodes": 1, "n_gpus_per_node": 3}},
            (
                "ray_kwargs.ray_init.num_gpus=2: Ray must be told of at least 5 virtual devices: "
                "+ray_kwargs.ray_init.num_gpus=5"
            ),
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(config, key, value, problem):
    OmegaConf.update(config, key, value, merge=isinstance(value, dict) and "hybrid_engine" in value)
    assert problems(config) == [problem]


def test_megatron_needs_its_own_layers_and_one_precision(config):
    engine = {"vanilla_mbridge": True, "dtype": "bfloat16", "use_distributed_optimizer": True}
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        OmegaConf.update(config, f"{role}.strategy", "megatron", force_add=True)
        OmegaConf.update(config, f"{role}.megatron", engine, force_add=True)
    for model in ("actor_rollout_ref.model", "critic.model"):
        OmegaConf.update(config, f"{model}.use_remove_padding", False, force_add=True)
    OmegaConf.update(config, "trainer.save_freq", 3, force_add=True)
    assert problems(config) == []
    for key, value in (
        ("critic.megatron.vanilla_mbridge", False),
        ("critic.megatron.dtype", "float16"),
        ("critic.megatron.use_distributed_optimizer", False),
        ("critic.model.use_remove_padding", True),
    ):
        changed = config.copy()
        OmegaConf.update(changed, key, value, force_add=True)
        assert [problem.partition("=")[0] for problem in problems(changed)] == [key]
    # A reference is not saved, and a run without checkpoints saves no optimizer.
    config.actor_rollout_ref.ref.megatron.use_distributed_optimizer = False
    assert problems(config) == []
    config.critic.megatron.use_distributed_optimizer, config.trainer.save_freq = False, -1
    assert problems(config) == []


def test_buffers_of_dead_runs_are_removed_on_this_platform_alone(monkeypatch, tmp_path, caplog):
    removed = []
    monkeypatch.setattr(
        "verl_fuse_cpu.plugin.remove_leftovers", lambda: removed.append(1) or [tmp_path / "verl_weights_1"]
    )
    for platform, times in (("nvidia", 0), ("cpu", 1)):
        monkeypatch.setenv("VERL_PLATFORM", platform)
        CpuPlugin().fuse_setup(trainer=None)
        assert (len(removed), caplog.text.count("verl_weights_1, left by a dead run")) == (times, times)


def test_its_contracts_are_asked_for_on_this_platform_and_by_whoever_asks_for_all(config, monkeypatch):
    found = CpuPlugin().fuse_contracts(config=config)
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    assert CpuPlugin().fuse_contracts(config=config) == ()
    assert list(CpuPlugin().fuse_contracts(config=None)) == list(found) != []


def test_a_critic_that_does_not_run_is_not_judged(config):
    config.critic.strategy, config.critic.fsdp, config.critic.model.override_config = "fsdp", {}, {}
    config.algorithm.adv_estimator = "grpo"
    assert problems(config) == []
    config.critic.enable = True
    assert len(problems(config)) == 2


def test_a_reference_that_does_not_run_is_not_judged(config):
    config.actor_rollout_ref.ref = {"strategy": "fsdp"}
    assert len(problems(config)) == 1, "its precision is verl's"
    config.actor_rollout_ref.actor.use_kl_loss = False
    assert problems(config) == []


def test_the_platform_must_be_chosen_in_the_environment(config, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    assert problems(config) == ["VERL_PLATFORM=null: trainer.device=cpu needs VERL_PLATFORM=cpu in the environment"]


def test_a_platform_that_failed_to_register_is_named(config, monkeypatch):
    entry = SimpleNamespace(failure=RuntimeError("patch 'gloo_backend' is refused"))
    monkeypatch.setitem(sys.modules, "verl_fuse_cpu.entry", entry)
    assert problems(config) == [
        "VERL_PLATFORM='cpu': the cpu platform could not be registered: patch 'gloo_backend' is refused"
    ]


def test_weight_buffers_must_fit_shared_memory(config, monkeypatch, tmp_path):
    monkeypatch.setattr(refusals.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes = 50
    assert problems(config) == []
    config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes = 51
    assert problems(config) == [
        (
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=51: "
            f"2 ranks take a buffer each from {tmp_path}, which has 100 MiB free: at most 50"
        )
    ]


def test_weight_buffers_are_those_of_the_rollout_s_devices_beside_what_dead_runs_left(config, monkeypatch, tmp_path):
    monkeypatch.setattr(refusals.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    rollout = config.actor_rollout_ref.rollout
    config.actor_rollout_ref.hybrid_engine, rollout.nnodes, rollout.n_gpus_per_node = False, 1, 4
    config.ray_kwargs.ray_init.num_gpus = 6
    rollout.checkpoint_engine.update_weights_bucket_megabytes = 26
    (problem,) = problems(config)
    assert problem.endswith(f"4 ranks take a buffer each from {tmp_path}, which has 100 MiB free: at most 25")
    with (tmp_path / "verl_weights_0123").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 4 << 20)
    assert problems(config) == []


def test_a_cluster_that_is_there_knows_its_devices_itself(config):
    config.ray_kwargs.ray_init = {"address": "auto"}
    assert problems(config) == []


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_parallel_workers_in_one_process_are_refused(config, kind):
    rollout = config.actor_rollout_ref.rollout
    rollout.engine_kwargs.vllm.distributed_executor_backend = "uni"
    assert problems(config) == []
    rollout[f"{kind}_model_parallel_size"] = 2
    assert problems(config) == [
        (
            "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend='uni': "
            f"actor_rollout_ref.rollout.{kind}_model_parallel_size=2 needs mp: one process waits for the others for "
            "ever"
        )
    ]
    rollout.engine_kwargs.vllm.distributed_executor_backend = "mp"
    assert problems(config) == []


def test_two_sizes_for_the_cache_are_refused(config, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert problems(config) == [
        (
            "VLLM_CPU_KVCACHE_SPACE='4': overrides actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes: "
            "unset the variable, or drop the key"
        )
    ]
    del config.actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes
    assert problems(config) == []


def test_a_vocabulary_that_does_not_match_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    config.actor_rollout_ref.model.path = str(tmp_path)
    assert problems(config) == [
        (
            f"actor_rollout_ref.model.path={str(tmp_path)!r}: config.json has vocab_size=128, the tokenizer 2 entries: "
            "they must be equal, "
            "or log-probs of rollout and trainer differ by a constant"
        )
    ]


def test_the_critic_s_vocabulary_is_read_too(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    config.critic.model.path = str(tmp_path)
    assert [problem.partition("=")[0] for problem in problems(config)] == ["critic.model.path"]
    config.algorithm.adv_estimator = "grpo"
    assert problems(config) == []


def test_an_empty_configuration_is_refused_without_stumbling():
    keys = {str(problem.key) for problem in CpuPlugin().fuse_validate(OmegaConf.create({})) or ()}
    assert "trainer.device" in keys
    assert "ray_kwargs.ray_init.num_gpus" in keys


def test_the_plugin_imports_nothing_heavy():
    program = (
        "import sys, verl_fuse_cpu.plugin; print([name for name in ('torch', 'ray', 'verl', 'vllm', 'transformers') "
        "if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
