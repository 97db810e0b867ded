"""Trained models as verl builds them from a whole configuration, and the copies of a slice: the numbers of both for the
same samples, one gloo process.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "runtime"))
from ranks import World

from ci.gpu.parts.slices import critic_of

LENGTHS = ((3, 9), (5, 2), (4, 7), (8, 8), (6, 1), (2, 11), (7, 5), (3, 4))
STAGES = ("old_log_prob", "ref", "values")
TEMPERATURE = 0.8


def write_models(folder: Path) -> None:
    """Two random Llamas with a tokenizer: the policy, whose embeddings are tied, and what the critic begins
    with, which has other widths."""
    import torch
    from transformers import LlamaForCausalLM

    from verl_fuse_cpu.task.tokenizer import build_tokenizer
    from verl_fuse_cpu.task.warm_start import build_model

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = build_model(tokenizer, layers=2).config
    for name, changed in (("policy", {"tie_word_embeddings": True}), ("critic", {"intermediate_size": 64})):
        LlamaForCausalLM(type(config)(**{**config.to_dict(), **changed})).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


# Families beside Llama: verl's class of settings, and what each adds to _SIZES. All are drawn at random.
_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        **_EXPERTS,
    },
}


def write_family(folder: Path, family: str, sizes: Mapping[str, int] = MappingProxyType({})) -> Path:
    """A random model of this family with the task's tokenizer; `sizes` count in place of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_fuse_cpu.task.tokenizer import build_tokenizer
    from verl_fuse_cpu.task.warm_start import build_model

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    like = build_model(tokenizer, layers=1).config
    tokens = {key: getattr(like, key) for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    config = AutoConfig.for_model(family, **_SIZES | FAMILIES[family] | sizes | tokens)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    tokenizer.save_pretrained(folder / family)
    return folder / family


def configuration(folder: Path) -> dict[str, Any]:
    """The recipe `ppo-cpu` with these models, interpolations unresolved."""
    from omegaconf import OmegaConf

    from verl_fuse.cli.composition import compose
    from verl_fuse.cli.recipes import find_recipe

    steps = [f"{engine}.optim.total_training_steps=10" for engine in ("actor_rollout_ref.actor", "critic")]
    paths = [f"actor_rollout_ref.model.path={folder / 'policy'}", f"critic.model.path={folder / 'critic'}"]
    composed: Any = OmegaConf.to_container(compose(find_recipe("ppo-cpu"), [*steps, *paths]), resolve=False)
    return composed


def numbers(
    world: World,
    composed: dict[str, Any],
    overrides: Sequence[str],
    response_logits: bool = False,
    shared_prompts: bool = False,
) -> dict[str, list[Any]]:
    """Field -> (numbers of the model itself, through the calls of verl's workers; numbers of its copy), one
    value per response token; with `response_logits` both have logits of responses alone, with `shared_prompts` both
    compute each prompt once."""
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        return _numbers(_prepared(world, composed, overrides), response_logits, shared_prompts)


def built(world: World, composed: dict[str, Any], stages: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the stages whose copies a slice has, once the slice is built."""
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        from verl_fuse_interstage.slices.models import build_models

        return sorted(build_models(stages, _prepared(world, composed, overrides).actor_rollout_ref, None))


def kept(world: World, composed: dict[str, Any], overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Stage -> dtypes of its copy's parameters and floating-point buffers; how often a shard is copied to the device in
    two calls of two micro-batches with weights held, and in one after their release; which parameters are gathered
    then; whether all three calls gave the same numbers."""
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        return _kept(_prepared(world, composed, overrides))


def adapted(world: World, composed: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A policy with adapters and its one copy, after an export of everything and after an export of the trained
    parameters: per step the largest difference of each field from the model's own, of the reference from the old
    log-probs, and the bytes exported."""
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        return _adapted(_prepared(world, composed, overrides))


def settings(world: World) -> list[str]:
    """The settings of an engine and of a model, as far as verl has fields for them."""
    import dataclasses

    from verl.workers.config import FSDPEngineConfig, HFModelConfig

    names = {field.name for kind in (FSDPEngineConfig, HFModelConfig) for field in dataclasses.fields(kind)}
    return sorted(names - {"_target_"})


def _numbers(config: Any, response_logits: bool, shared_prompts: bool) -> dict[str, list[Any]]:
    import torch
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from verl_fuse.host.inference.response_logits import ResponseLogits, response_logits_worker_class
    from verl_fuse.host.sharing.engine import (
        SharedPrompts,
        shared_prompts_critic_class,
        shared_prompts_worker_class,
    )
    from verl_fuse.host.weights.buckets import export_parameters, load_parameters
    from verl_fuse_interstage.slices.models import build_models, compute

    kind = response_logits_worker_class(ActorRolloutRefWorker, True) if response_logits else ActorRolloutRefWorker
    kind = shared_prompts_worker_class(kind, True) if shared_prompts else kind
    of_critic = critic_of(config)
    # The value head is new.
    torch.manual_seed(0)
    # verl's order, one process for all of them, as in its workers.
    critic = (shared_prompts_critic_class(TrainingWorker) if shared_prompts else TrainingWorker)(config=of_critic)
    critic.reset()
    policy = {role: kind(config=config.actor_rollout_ref.copy(), role=role) for role in ("ref", "actor")}
    for worker in policy.values():
        worker.init_model()
    own = {"old_log_prob": policy["actor"].actor, "ref": policy["ref"].ref, "values": critic}
    # Trained models are no longer what a copy loads from disk.
    for stage in ("old_log_prob", "values"):
        with torch.no_grad():
            for parameter in own[stage].engine.module.parameters():
                parameter.mul_(1.1)
    copies = build_models(STAGES, config.actor_rollout_ref, of_critic, 1, response_logits, shared_prompts)
    assert all(copy.engine.optimizer is None for copy in copies.values()), "forward-only"
    for models in (own, copies):
        for kind, on in ((ResponseLogits, response_logits), (SharedPrompts, shared_prompts)):
            found = {stage: isinstance(model.engine, kind) for stage, model in models.items()}
            # A value head makes one number a token.
            assert found == {"old_log_prob": on, "ref": on, "values": on and kind is SharedPrompts}
    for stage in ("old_log_prob", "values"):
        load_parameters(copies[stage].engine, list(export_parameters(own[stage].engine)))
    calls = {
        "old_log_prob": policy["actor"].compute_log_prob,
        "ref": policy["ref"].compute_ref_log_prob,
        "values": critic.infer_batch,
    }
    fields_of: dict[str, list[Any]] = {}
    for stage in STAGES:
        mine = _own(stage, calls[stage])
        fields = compute(stage, copies[stage], _batch(), TEMPERATURE)
        assert fields is not None
        for name, of_model in mine.items():
            fields_of[name] = [[row.float().numpy() for row in of.unbind()] for of in (of_model, fields[name])]
        if shared_prompts:
            for model in (own[stage], copies[stage]):
                _, prompts, computed = model.engine.take_tokens()
                assert prompts - computed == LENGTHS[0][0] - 1, "two rows have the same prompt"
    return fields_of


def _adapted(config: Any) -> dict[str, Any]:
    import torch
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from verl_fuse.host.weights.buckets import export_parameters, load_parameters
    from verl_fuse.host.weights.exports import frozen_parameters
    from verl_fuse_interstage.slices.models import build_models, compute

    policy = ActorRolloutRefWorker(config=config.actor_rollout_ref.copy(), role="actor")
    policy.init_model()
    engine = policy.actor.engine
    copies = build_models(("old_log_prob", "ref"), config.actor_rollout_ref, None)
    found: dict[str, Any] = {"models": len(set(map(id, copies.values()))), "bytes": [], "far": [], "apart": []}
    draw = torch.Generator().manual_seed(3)
    for whole in (True, False):
        with torch.no_grad():
            for parameter in engine.module.parameters():
                if parameter.requires_grad:
                    local = parameter.to_local()
                    local.copy_(torch.randn(local.shape, generator=draw) * 0.1)
                elif whole:
                    # No longer what a copy loads from disk.
                    parameter.mul_(1.1)
        frozen = frozenset() if whole else frozen_parameters(engine.module)
        buckets = list(export_parameters(engine, frozen))
        load_parameters(copies["old_log_prob"].engine, buckets, frozen)
        found["bytes"].append(sum(shard.data.nbytes for bucket in buckets for shard in bucket))
        far, stored = {}, {}
        for stage in copies:
            for name, of_model in _own(stage, policy.compute_log_prob, no_lora_adapter=stage == "ref").items():
                fields = compute(stage, copies[stage], _batch(), TEMPERATURE)
                stored[name] = fields[name]
                far[name] = _furthest(of_model, fields[name])
        found["far"].append(far)
        found["apart"].append(_furthest(stored["old_log_probs"], stored["ref_log_prob"]))
    return found


def _furthest(one: Any, other: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one.unbind(), other.unbind(), strict=True))


def _kept(config: Any) -> dict[str, dict[str, Any]]:
    import torch

    from verl_fuse.host.weights.memory import rank_memory
    from verl_fuse_interstage.slices.device_weights import DeviceWeights
    from verl_fuse_interstage.slices.models import build_models, compute

    copies = []

    class Shard(torch.Tensor):
        """One in host memory."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.to:
                copies.append(func)
                return args[0].as_subclass(torch.Tensor).to(*args[1:], **kwargs)
            return super().__torch_function__(func, types, args, kwargs or {})

    torch.manual_seed(0)
    models = build_models(STAGES, config.actor_rollout_ref, critic_of(config))
    found: dict[str, dict[str, Any]] = {}
    for stage, model in models.items():
        module = model.engine.module
        weights = DeviceWeights(model.engine, stage)
        weights.shards.place([tensor.as_subclass(Shard) for tensor in weights.shards.tensors], offloaded=True)
        counts, numbers = [], []
        for held in (True, True, False):
            if held:
                weights.load()
            else:
                weights.release()
            fields = compute(stage, model, _batch(), TEMPERATURE)
            assert fields is not None
            numbers.append([row for field in fields.values() for row in field.unbind()])
            counts.append(len(copies))
            copies.clear()
        weights.load()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        fields = compute(stage, model, _batch(), TEMPERATURE)
        gc.collect()
        gc.set_debug(0)
        in_circles = [tuple(found.shape) for found in gc.garbage if isinstance(found, torch.Tensor)]
        gc.garbage.clear()
        weights.release()
        copies.clear()
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        found[stage] = {
            "parameters": {str(parameter.dtype) for parameter in module.parameters()},
            "buffers": {str(buffer.dtype) for buffer in buffers},
            "shards": len(weights.shards.tensors),
            "memory": rank_memory(model.engine, "here"),
            "copies": counts,
            "in circles": in_circles,
            "gathered": [shard for shard in weights.shards.parameters if shard.sharded_state.name != "SHARDED"],
            "equal": all(torch.equal(a, b) for other in numbers[1:] for a, b in zip(numbers[0], other, strict=True)),
        }
    return found


def _own(stage: str, call: Any, **asked: Any) -> dict[str, Any]:
    """Return the fields that the trainer stores of a stage (verl/trainer/ppo/v1/trainer_base.py)."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    data = _batch()
    tu.assign_non_tensor(
        data, calculate_entropy=stage == "old_log_prob", compute_loss=False, temperature=TEMPERATURE, **asked
    )
    output = call(data)
    names = {"old_log_prob": {"old_log_probs": "log_probs", "entropy": "entropy"}, "ref": {"ref_log_prob": "log_probs"}}
    stored = names.get(stage, {"values": "values"})
    return {name: response_from_nested(output[of], data["response_mask"]) for name, of in stored.items()}


def _batch() -> Any:
    import torch
    from tensordict import TensorDict

    draw = torch.Generator().manual_seed(7)

    def nested(rows: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    prompts = [torch.randint(1, 90, (p,), generator=draw) for p, _ in LENGTHS]
    # Two samples of a prompt.
    prompts[-1] = prompts[0]
    responses = [torch.randint(1, 90, (r,), generator=draw) for _, r in LENGTHS]
    fields = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested([torch.cat(pair) for pair in zip(prompts, responses, strict=True)]),
        "position_ids": nested([torch.arange(p + r) for p, r in LENGTHS]),
        "loss_mask": nested([torch.cat([torch.zeros(p), torch.ones(r)]) for p, r in LENGTHS]),
        "response_mask": nested([torch.ones(r) for _, r in LENGTHS]),
    }
    return TensorDict(fields, batch_size=len(LENGTHS))


def _prepared(world: World, composed: dict[str, Any], overrides: Sequence[str]) -> Any:
    """The configuration with `overrides` in a process that verl takes for one of its workers."""
    import gc

    from omegaconf import OmegaConf

    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    # verl collects garbage whenever it has built a model: what was imported is none.
    gc.freeze()
    config = OmegaConf.merge(OmegaConf.create(composed), OmegaConf.from_dotlist(list(overrides)))
    OmegaConf.resolve(config)
    return config
