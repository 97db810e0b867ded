"""Refusals of the plugin `realloc`, and the runs in which it takes part."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.hookspecs import hookimpl
from verl_fuse.runtime.reshard.options import TransferOptions
from verl_fuse_realloc.plugin import ReallocPlugin

PLUGIN = ReallocPlugin()
ROLLOUT = {
    "name": "vllm",
    "dtype": "bfloat16",
    "quantization": None,
    "data_parallel_size": 1,
    "expert_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "disaggregation": {"enabled": False},
}
# Of verl's configuration of a Megatron engine.
MEGATRON = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "dynamic_context_parallel": False,
    "use_megatron_fsdp": False,
    "param_offload": True,
    "qat": {"enable": False},
    "override_transformer_config": {},
}


def composed(**changes):
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}},
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2", "fsdp_config": {"qat": {"enable": False}}},
                "rollout": ROLLOUT,
                "model": {"lora_rank": 0, "lora": {"rank": 0}, "mtp": {"enable": False}},
                "hybrid_engine": True,
            },
            "fuse": {"realloc": {"weight_sync": "shards", "timeout": 30.0, "checksums": True}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def refused(**changes) -> list[tuple]:
    return [(r.key, r.value) for r in PLUGIN.fuse_validate(config=composed(**changes)) or ()]


def test_what_fits_is_not_refused_and_stock_asks_nothing():
    assert refused() == []
    stock = composed(fuse__realloc__weight_sync="stock", actor_rollout_ref__actor__strategy="megatron")
    assert PLUGIN.fuse_validate(config=stock) == []
    assert PLUGIN.fuse_contracts(config=stock) == ()
    hook = plugins.load().hook
    assert hook.fuse_worker_class(model="actor", base=object, config=stock) is None
    assert hook.fuse_worker_class(model="critic", base=object, config=composed()) is None


def test_the_sync_goes_on_top_of_another_plugins_workers():
    pytest.importorskip("verl")

    class Worker:
        async def update_weights(self): ...

    class Other(Worker): ...

    class Stranger:
        @hookimpl
        def fuse_worker_class(self, model, base):
            return Other if base is Worker else None

    manager = plugins.load()
    manager.register(Stranger())
    found = manager.hook.fuse_worker_class(model="actor", base=Worker, config=composed())
    assert found.__mro__[1:3] == (Other, Worker)
    assert found.update_weights is not Worker.update_weights


# Ray warns when verl is imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("block", "options"),
    [({"timeout": 30.0, "checksums": True}, TransferOptions(30.0, True)), ({}, TransferOptions(300.0, False))],
)
def test_workers_wait_and_sum_as_the_block_says(monkeypatch, block, options):
    pytest.importorskip("verl")
    asked = []
    target = "verl_fuse_realloc.sync.hybrid.shard_sync_worker_class"
    monkeypatch.setattr(target, lambda base, options: asked.append(options) or object)
    config = composed()
    config.fuse.realloc = {"weight_sync": "shards", **block}
    plugins.load().hook.fuse_worker_class(model="actor", base=object, config=config)
    assert asked == [options]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("actor_rollout_ref.actor.strategy", "fsdp"),
        ("actor_rollout_ref.rollout.name", "sglang"),
        ("actor_rollout_ref.rollout.dtype", "auto"),
        ("actor_rollout_ref.rollout.quantization", "fp8"),
        ("actor_rollout_ref.rollout.data_parallel_size", 2),
        ("actor_rollout_ref.rollout.expert_parallel_size", 2),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", 2),
        ("actor_rollout_ref.rollout.disaggregation.enabled", True),
        ("actor_rollout_ref.actor.fsdp_config.qat.enable", True),
        ("actor_rollout_ref.model.lora_rank", 8),
        ("actor_rollout_ref.model.lora.rank", 8),
        ("actor_rollout_ref.model.mtp.enable", True),
        ("actor_rollout_ref.hybrid_engine", False),
    ],
)
def test_what_is_refused_names_key_value_and_what_is_allowed(key: str, value: object):
    (refusal,) = PLUGIN.fuse_validate(config=composed(**{key.replace(".", "__"): value})) or ()
    assert (refusal.key, refusal.value) == (key, value)
    assert "fuse.realloc.weight_sync=shards" in refusal.allowed


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"model_type": "gemma3_text"}, None),
        ({"model_type": "gpt_oss"}, "model_type='gpt_oss'; parameters are known for llama, "),
        ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3'; parameters are known for llama, "),
        ({"model_type": "mixtral"}, "model_type='mixtral'; parameters are known for llama, "),
        ({"attention_bias": True}, "attention_bias=True; parameters of llama are known without"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None; needs a whole number"),
    ],
)
def test_a_family_whose_parameters_are_not_known_is_refused_by_name(tmp_path: Path, changes: dict, said: str | None):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    found = PLUGIN.fuse_validate(config=composed(actor_rollout_ref__model__path=str(tmp_path))) or ()
    assert [refusal.key for refusal in found] == ([] if said is None else ["actor_rollout_ref.model.path"])
    assert all(str(said) in refusal.allowed for refusal in found)
    assert refused(actor_rollout_ref__model__path="a/name/of/a/hub") == []


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000], ids=["empty", "list", "cut", "bytes", "deep"]
)
def test_a_damaged_model_configuration_is_refused_by_name(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_bytes(content)
    (found,) = PLUGIN.fuse_validate(config=composed(actor_rollout_ref__model__path=str(tmp_path))) or ()
    assert found.key == "actor_rollout_ref.model.path"
    assert f"{tmp_path}/config.json: " in found.allowed


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("virtual_pipeline_model_parallel_size", 2, "1"),
        ("expert_tensor_parallel_size", 1, "null, or 2, as other parameters are cut"),
        ("context_parallel_size", 2, "1"),
        ("dynamic_context_parallel", True, "false"),
        ("use_megatron_fsdp", True, "false"),
        ("qat.enable", True, "false"),
        ("override_transformer_config.fp8", "hybrid", "null"),
        ("override_transformer_config.pipeline_model_parallel_layout", "Et|tL", "null"),
    ],
)
def test_megatron_engines_fit_but_for_what_cuts_their_shards_otherwise(key: str, value: object, allowed: str):
    engine = {"actor_rollout_ref__actor__strategy": "megatron", "actor_rollout_ref__actor__megatron": MEGATRON}
    assert refused(**engine) == []
    assert refused(**engine, actor_rollout_ref__actor__megatron__expert_tensor_parallel_size=2) == []
    key = f"actor_rollout_ref.actor.megatron.{key}"
    config = composed(**engine)
    OmegaConf.update(config, key, value, force_add=True)
    (refusal,) = PLUGIN.fuse_validate(config=config) or ()
    assert (refusal.key, refusal.value) == (key, value)
    assert refusal.allowed == f"fuse.realloc.weight_sync=shards needs {allowed}"


def test_megatrons_seams_are_asked_for_by_its_runs_only():
    of_fsdp = set(PLUGIN.fuse_contracts(config=composed()))
    of_megatron = set(PLUGIN.fuse_contracts(config=composed(actor_rollout_ref__actor__strategy="megatron")))
    assert of_fsdp < of_megatron <= set(PLUGIN.fuse_contracts(config=None))
