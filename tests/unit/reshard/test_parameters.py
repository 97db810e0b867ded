"""Parameters and FSDP shards are those of the real classes: transformers' models, torch's fully_shard."""

import json
import subprocess
import sys

import pytest
from layouts import LLAMA, MOE, QWEN2, QWEN3

from verl_fuse.reshard.fsdp import FsdpSharding
from verl_fuse.reshard.parameters import ModelParameters, parameters_of

# Prints, for a configuration and a number of shards, the names and shapes of each rank's tensors under fully_shard.
SHARDED = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

for line in sys.stdin:
    config, value_head, shards = json.loads(line)
    kind = AutoModelForTokenClassification if value_head else AutoModelForCausalLM
    found = []
    for rank in range(shards):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shards)
        with torch.device("meta"):
            model = kind.from_config(AutoConfig.for_model(**config))
        fully_shard(model, mesh=init_device_mesh("cpu", (shards,)))
        found.append({name: list(tensor.to_local().shape) for name, tensor in model.state_dict().items()})
        dist.destroy_process_group()
    print(json.dumps(found))
"""


def config(weights: ModelParameters, model_type: str) -> dict:
    """Return the config.json of a model."""
    model = weights.model
    found = {
        "model_type": model_type,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.value_head:
        found["num_labels"] = 1
    if model.experts:
        found |= {
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.intermediate,
            "shared_expert_intermediate_size": model.shared_intermediate,
        }
    return found


# Qwen2's attention derives the width of a head from the hidden size.
NARROW = parameters_of(type(QWEN2.model)("n", 2, 32, 8, 2, 4, 48, 120, tied_embeddings=True), "qwen2")
CASES = {
    "qwen2": (NARROW, 3),
    "llama": (LLAMA, 7),
    "qwen3": (QWEN3, 4),
    "qwen2_moe": (parameters_of(type(MOE.model)("m", 2, 32, 8, 4, 4, 16, 96, False, 8, 2, 32), "qwen2_moe"), 3),
    "mistral": (parameters_of(LLAMA.model, "mistral"), 2),
    "qwen3_moe": (parameters_of(type(MOE.model)("m", 2, 32, 8, 4, 4, 16, 96, False, 6, 2), "qwen3_moe"), 4),
    "gemma": (parameters_of(NARROW.model, "gemma"), 3),
    "gemma2": (parameters_of(NARROW.model, "gemma2"), 2),
    "gemma3_text": (parameters_of(NARROW.model, "gemma3_text"), 3),
    "critic": (parameters_of(NARROW.model.as_value_model(), "qwen2", head_bias=True), 2),
}


@pytest.fixture(scope="module")
def real() -> dict[str, list[dict]]:
    lines = [
        json.dumps([config(weights, "qwen2" if name == "critic" else name), weights.model.value_head, shards])
        for name, (weights, shards) in CASES.items()
    ]
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return {name: json.loads(line) for name, line in zip(CASES, process.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_tensors_of_fully_shard(name: str, real: dict[str, list[dict]]):
    weights, shards = CASES[name]
    for rank in range(shards):
        theirs = {key: shape for key, shape in real[name][rank].items() if 0 not in shape}
        if weights.model.tied_embeddings:
            theirs.pop("lm_head.weight", None)
        ours = {tensor.name: list(tensor.shape) for tensor in FsdpSharding(shards).tensors(weights, rank)}
        assert ours == theirs
