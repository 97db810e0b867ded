"""(b) Measures the memory of the models of a slice: before they are built, built, with a step's weights, in a step at
most, and after the step.

A slice shares its devices with a rollout replica that wakes again, so after a step the slice must hold next to nothing
there. One process builds the copies of actor, critic and reference with verl's own code, like a slice; vLLM is not
needed.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from ci.gpu.machine import require_packages
from ci.gpu.processes import Rank, on_ranks

# Layers and widths of a random Llama, prompts and responses of a step's samples.
SIZES = {"cuda": (16, 2048, 8192, 32), "cpu": (2, 64, 128, 4)}
SAMPLES, PROMPT, RESPONSE = 16, {"cuda": 256, "cpu": 4}, {"cuda": 1024, "cpu": 12}
STAGES = ("old_log_prob", "ref", "values")
# Torch may keep so many more bytes of a device after a step than before: workspaces of cuBLAS.
MOST_LEFT = 128 * 2**20
# The recipe's platform is a CPU's; a GPU needs these settings instead.
ON_GPU = (
    "~platform",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "critic.strategy=fsdp2",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "+critic.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=false",
    "critic.model.use_remove_padding=false",
)


def run(device: torch.device, out: Path, *, tiny: bool) -> dict[str, Any]:
    require_packages("verl", "ray", "tensordict", "hydra-core", "tokenizers")
    kind = device.type
    if kind == "cpu":
        from verl_fuse_cpu.environment import environment

        os.environ.update(environment())
    with tempfile.TemporaryDirectory(prefix="verl-fuse-slices-") as folder:
        _write_model(Path(folder), *SIZES["cpu" if tiny else kind])
        backend = "nccl" if kind == "cuda" else "gloo"
        (found,) = on_ranks(1, backend, kind, memory, folder, PROMPT[kind], RESPONSE[kind])
    return {"bytes": found, "faults": faults(found, kind)}


def faults(found: dict[str, dict[str, int]], kind: str) -> list[str]:
    """Return a fault where a slice keeps too much memory; none on a host, which does not give freed memory back to the
    system."""
    if kind == "cpu":
        return []
    left = found["after a step"]["now"] - found["before"]["now"]
    return [f"a slice keeps {left} bytes after a step; needs at most {MOST_LEFT}"] if left > MOST_LEFT else []


def _write_model(folder: Path, layers: int, hidden: int, intermediate: int, heads: int) -> None:
    from transformers import LlamaForCausalLM

    from verl_fuse_cpu.task.tokenizer import build_tokenizer
    from verl_fuse_cpu.task.warm_start import build_model

    tokenizer = build_tokenizer()
    small = build_model(tokenizer, layers=1).config
    changed = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    changed |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": hidden // heads}
    changed |= {"max_position_embeddings": 4096}
    model: Any = LlamaForCausalLM(type(small)(**{**small.to_dict(), **changed}))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def memory(rank: Rank, folder: str, prompt: int, response: int) -> dict[str, dict[str, int]]:
    """Return the bytes of this process's device, now and at most since the line before, by the work done."""
    import gc

    from omegaconf import OmegaConf

    from verl_fuse.cli.composition import compose
    from verl_fuse.cli.recipes import find_recipe
    from verl_fuse.host.weights.buckets import export_parameters, load_parameters
    from verl_fuse_interstage.slices.device_weights import DeviceWeights
    from verl_fuse_interstage.slices.models import build_models, compute

    os.environ.update(
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    )
    paths = [f"actor_rollout_ref.model.path={folder}", f"critic.model.path={folder}"]
    platform = ON_GPU if rank.device.type == "cuda" else ()
    config: Any = compose(find_recipe("ppo-cpu"), [*paths, *platform])
    OmegaConf.resolve(config)
    found = {"before": _bytes(rank.device)}
    models = build_models(STAGES, config.actor_rollout_ref, critic_of(config))
    found["built"] = _bytes(rank.device)
    for model in models.values():
        load_parameters(model.engine, list(export_parameters(model.engine)))
    found["with a step's weights"] = _bytes(rank.device)
    rows = _samples(prompt, response)
    weights = {stage: DeviceWeights(model.engine, stage) for stage, model in models.items()}
    for stage, model in models.items():
        weights[stage].load()
        found[f"weights of {stage}"] = _bytes(rank.device)
        compute(stage, model, rows, 1.0)
        found[f"in {stage}"] = _bytes(rank.device)
    for held in weights.values():
        held.release()
    gc.collect()
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()
    found["after a step"] = _bytes(rank.device)
    return found


def _bytes(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found = {
            "now": torch.cuda.memory_allocated(),
            "at most": torch.cuda.max_memory_allocated(),
            "device": total - free,
        }
        torch.cuda.reset_peak_memory_stats()
        return found
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"now": int(status["VmRSS"].split()[0]) * 1024, "at most": int(status["VmHWM"].split()[0]) * 1024}


def critic_of(config: Any) -> Any:
    """Return the configuration that verl's trainer gives the critic's workers (verl/trainer/ppo/v1/trainer_base.py
    `_setup`)."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig

    critic: Any = omega_conf_to_dataclass(config.critic)
    critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
        profiler_config=None,
    )


def _samples(prompt: int, response: int) -> Any:
    from tensordict import TensorDict

    draw = torch.Generator().manual_seed(7)
    lengths = [(prompt, 1 + int(torch.randint(response, (1,), generator=draw))) for _ in range(SAMPLES)]

    def nested(rows: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    prompts, responses = ([torch.randint(1, 90, (pair[i],), generator=draw) for pair in lengths] for i in (0, 1))
    fields = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested([torch.cat(pair) for pair in zip(prompts, responses, strict=True)]),
        "position_ids": nested([torch.arange(p + r) for p, r in lengths]),
        "loss_mask": nested([torch.cat([torch.zeros(p), torch.ones(r)]) for p, r in lengths]),
        "response_mask": nested([torch.ones(r) for _, r in lengths]),
    }
    return TensorDict(fields, batch_size=SAMPLES)
