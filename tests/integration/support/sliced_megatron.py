"""Trained Megatron models as verl builds them, and the copies of a slice in the same four gloo processes: the numbers
of both.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from ranks import World
from slice_copies import TEMPERATURE, _batch, _own, _prepared

from ci.gpu.parts.slices import critic_of

# Tensor parallelism divides the vocabulary.
EVEN = 112


def write_models(folder: Path, family: str, options: Mapping[str, Any]) -> None:
    """A random policy of this family, and what the critic begins with, which has other widths and a head of its own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_fuse_cpu.task.tokenizer import build_tokenizer

    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    for name, width in (("policy", 48), ("critic", 64)):
        wanted = {**sizes, "intermediate_size": width, "vocab_size": EVEN, "tie_word_embeddings": False}
        config = AutoConfig.for_model(family, **wanted | dict(options if name == "policy" else {}))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)


def configuration(folder: Path) -> dict[str, Any]:
    """The recipe `ppo-megatron-cpu` with these models, interpolations unresolved."""
    from omegaconf import OmegaConf

    from verl_fuse.cli.composition import compose
    from verl_fuse.cli.recipes import find_recipe

    changes = [f"{engine}.optim.total_training_steps=10" for engine in ("actor_rollout_ref.actor", "critic")]
    changes += ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"]
    changes += [f"actor_rollout_ref.model.path={folder / 'policy'}", f"critic.model.path={folder / 'critic'}"]
    composed: Any = OmegaConf.to_container(compose(find_recipe("ppo-megatron-cpu"), changes), resolve=False)
    return composed


def numbers(
    world: World, composed: dict[str, Any], overrides: Sequence[str], stages: Sequence[str], devices: Sequence[int]
) -> dict[str, Any]:
    """By devices of a slice: how its copies are cut, field -> (numbers of the model itself, numbers of its copy) of
    every rank with outputs, and by stage the bytes of weights that every rank's copy has and was said to have."""
    import torch

    with pytest.MonkeyPatch.context() as patch, open(os.devnull, "w") as silence, redirect_stdout(silence):
        # Megatron moves the second copy of a tied head to an accelerator.
        patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        return _numbers(_prepared(world, composed, overrides), stages, devices)


def _numbers(config: Any, stages: Sequence[str], devices: Sequence[int]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from verl_fuse.host.weights.buckets import export_parameters, load_parameters
    from verl_fuse.spec.composed import getter
    from verl_fuse_interstage.copies import copy_of
    from verl_fuse_interstage.slices.megatron_copies import MegatronWeights
    from verl_fuse_interstage.slices.models import build_models, compute
    from verl_fuse_pipeline.megatron.view import View

    of_critic = critic_of(config) if "values" in stages else None
    with View("trained").active():
        torch.manual_seed(0)
        critic: Any = None
        if of_critic is not None:
            critic = TrainingWorker(config=of_critic)
            critic.reset()
        policy = {
            role: ActorRolloutRefWorker(config=config.actor_rollout_ref.copy(), role=role) for role in ("ref", "actor")
        }
        for worker in policy.values():
            worker.init_model()
        own = {"old_log_prob": policy["actor"].actor, "ref": policy["ref"].ref, "values": critic}
        # Trained models are no longer what a copy loads from disk.
        changing = [stage for stage in stages if stage != "ref"]
        for stage in changing:
            with torch.no_grad():
                for parameter in own[stage].engine.module[0].parameters():
                    parameter.mul_(1.1)
        calls = {
            "old_log_prob": policy["actor"].compute_log_prob,
            "ref": policy["ref"].compute_ref_log_prob,
            "values": None if critic is None else critic.infer_batch,
        }
        left = {stage: _gathered(export_parameters(own[stage].engine)) for stage in changing}
        memory = _memory({"actor": own["old_log_prob"], **({} if critic is None else {"critic": critic})})
        mine = {
            stage: _own(stage, calls[stage]) if _speaks(own[stage]) else _silent(stage, calls[stage])
            for stage in stages
        }
    found: dict[str, Any] = {"left": {s: sum(shard.data.nbytes for shard in of) for s, of in left.items()}}
    found["said to be left"] = {stage: copy_of(getter(config), stage, devices[0], memory).stored for stage in changing}
    for count in devices:
        with View(f"copies of {count}").active():
            copies = build_models(stages, config.actor_rollout_ref, of_critic, count)
            settings = copies["old_log_prob"].engine_config
            cut = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
            numbers: dict[str, Any] = {}
            sizes: dict[str, Any] = {}
            for stage, copy in copies.items():
                weights = MegatronWeights(copy.engine, stage)
                said = copy_of(getter(config), stage, count, memory)
                # All four ranks are one slice here: the device of a real one that has this stage.
                device = parallel_state.get_pipeline_model_parallel_rank() * count // cut[1]
                sizes[stage] = weights.nbytes, sum(said.tensors[device])
                if stage in left:
                    load_parameters(copy.engine, [left[stage]])
                weights.load()
                numbers |= compute(stage, copy, _batch(), TEMPERATURE) or {}
                weights.release()
        # Trained and copied, a rank that has outputs tells the others.
        both = [None] * dist.get_world_size()
        told = {stage: {name: _rows(rows) for name, rows in (fields or {}).items()} for stage, fields in mine.items()}
        dist.all_gather_object(both, (told, {name: _rows(rows) for name, rows in numbers.items()}))
        trained = {name: rows for of, _ in both for fields in of.values() for name, rows in fields.items()}
        copied = [of for _, of in both if of]
        sized: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sized, sizes)
        of_copies = {name: [(trained[name], of[name]) for of in copied] for name in trained}
        found[count] = {"cut": cut, "sizes": sized, "numbers": of_copies}
    return found


def _memory(trained: Mapping[str, Any]) -> dict[str, Any]:
    """What every rank says of its share of the trained models."""
    import torch.distributed as dist

    from verl_fuse.host.weights.memory import rank_memory

    mine = {model: rank_memory(worker.engine, "here") for model, worker in trained.items()}
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return {model: [of[model] for of in of_all] for model in trained}


def _speaks(worker: Any) -> bool:
    return worker.engine.is_mp_src_rank_with_outputs()


def _silent(stage: str, call: Any) -> None:
    """A rank without outputs takes part."""
    from verl.utils import tensordict_utils as tu

    data = _batch()
    tu.assign_non_tensor(data, calculate_entropy=stage == "old_log_prob", compute_loss=False, temperature=TEMPERATURE)
    assert call(data) is None


def _rows(field: Any) -> list[Any]:
    return [row.float().numpy() for row in field.unbind()]


def _gathered(buckets: Any) -> list[Any]:
    """Return the exports of all ranks, in the form that each slice's rank gets."""
    import torch.distributed as dist

    mine = [shard for bucket in buckets for shard in bucket]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return [shard for of in of_all for shard in of]
