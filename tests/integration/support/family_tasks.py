"""The CPU recipes' task with a random model of another family, and what vLLM's workers must hold of it."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slice_copies import write_family

# Without an accelerator vLLM has no narrower heads, and computes experts 32 columns at a time.
SIZES = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
# Those of a whole run. verl's agent loop makes qwen2's prompts with a newline, a token that the task does not have.
WHOLE = ("mistral", "gemma", "qwen3", "qwen3_moe")


def write_task(home: Path, family: str) -> Path:
    """The task `euclid` of `home`, with a model of this family in place of its own."""
    made = home / f"tasks/{family}"
    if not made.exists():
        shutil.copytree(home / "tasks/euclid", made)
        shutil.rmtree(made / "model")
        write_family(made, family, SIZES).rename(made / "model")
    return made


def of_vllm(task: Path, trained: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a vLLM worker without tensor parallelism that has these parameters, whole and by the names of
    transformers; padding is 0."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "runtime"))
    from transfers import tensors_of
    from transformers import AutoConfig

    from verl_fuse.reshard.parameters import parameters_of
    from verl_fuse.reshard.sharding import PlacedSharding
    from verl_fuse.reshard.vllm import VllmSharding
    from verl_fuse.spec.model import Model

    config = AutoConfig.from_pretrained(task / "model")
    weights = parameters_of(Model.from_hf(config.to_dict(), config.model_type), config.model_type)
    matrices = {name: tensor.reshape(tensor.shape[0], -1) for name, tensor in _one_by_one(trained)}
    return tensors_of(PlacedSharding.at(VllmSharding(1)), weights, 0, matrices)


def _one_by_one(trained: Mapping[str, Any]) -> Any:
    """As a checkpoint has them: transformers stacks experts."""
    for name, tensor in trained.items():
        prefix, stacked, kind = name.partition(".experts.")
        if not stacked:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
                yield f"{prefix}.experts.{number}.{part}.weight", matrix
