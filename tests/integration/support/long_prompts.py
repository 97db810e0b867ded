"""A task of long prompts, and a plugin that gives every second step back to verl's own routing and
writes down vLLM's counts."""

from pathlib import Path

import numpy as np

PROMPTS, SHORTEST, LONGEST = 8, 480, 640

ALTERNATING = '''
"""Every second step is routed by verl; each server's counters are written down when a step has been generated."""

import json
import os

import ray

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.events import Generated

HOOK_API = 2
_state = {"assigned": False, "trainer": None}


@hookimpl
def fuse_setup(trainer):
    _state["trainer"] = trainer._trainer


@hookimpl
def fuse_assign(prompts, replicas):
    _state["assigned"] = not _state["assigned"]
    # None: the built-in router is asked next. Nothing assigned: verl's own balancing.
    return None if _state["assigned"] else {}


def counters(server):
    from prometheus_client import REGISTRY

    found = {"queries": 0.0, "hits": 0.0}
    for family in REGISTRY.collect():
        for sample in family.samples:
            for name in found:
                if sample.name == f"vllm:prefix_cache_{name}_total":
                    found[name] += sample.value
    return found


@hookimpl
def fuse_event(event):
    if isinstance(event, Generated):
        replicas = _state["trainer"].llm_server_manager.get_replicas()
        counted = ray.get([replica.servers[0].__ray_call__.remote(counters) for replica in replicas])
        with open(os.environ["PREFIX_COUNTERS"], "a") as file:
            file.write(json.dumps({"step": event.step, "assigned": _state["assigned"], "servers": counted}) + "\\n")
'''


def make_task(folder: Path) -> None:
    """A random tiny model, and as many prompts as a step has, each of its own random numbers."""
    import pandas
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from verl_fuse_cpu.task.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    rows = [
        {
            "data_source": "numbers",
            "prompt": [{"role": "user", "content": "".join(f"{n:02d}" for n in rng.integers(0, 60, length))}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "01"},
            "extra_info": {"split": "train", "index": index},
        }
        for index, length in enumerate(rng.integers(SHORTEST, LONGEST, PROMPTS).tolist())
    ]
    for name in ("train", "validation"):
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
