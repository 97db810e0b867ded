"""(a) Makes the measurements of `verl-fuse profile`, with a grid that fits the device; the profile lies beside the
report, for `--profile` of simulate and plan."""

from pathlib import Path
from typing import Any

import torch

from verl_fuse.cost.table import ProfileTable
from verl_fuse.runtime.profile import BenchSettings, measure_device, measure_model, set_threads
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import model_named

# The measured models with the degrees of tensor parallelism of a shard, by kind of device.
MODELS = {"cuda": (("qwen2.5-0.5b", (1,)), ("qwen2.5-7b", (1, 2, 4))), "cpu": (("qwen2.5-0.5b", (1,)),)}
PRECISION = {"cuda": "bfloat16", "cpu": "float32"}
BATCHES = {"cuda": (1, 8, 32, 128), "cpu": (1, 4)}
LENGTHS = {"cuda": (128, 512, 1024), "cpu": (16, 64)}
TINY = Model("tiny", 2, 32, 4, 2, 8, 48, 50)
# Bytes per token and word of logits, their gradients and the values that softmax keeps; the part of the device's memory
# that they may take.
LOGIT_BYTES, PART_OF_MEMORY = 16, 0.6


def run(device: torch.device, out: Path, *, tiny: bool) -> dict[str, Any]:
    kind = device.type
    if kind == "cpu":
        set_threads(1)
    bench = BenchSettings(
        device, BenchSettings.on(kind, PRECISION[kind]).dtype, 1 if tiny else 5, 0.0 if tiny else 0.05
    )
    measured = measure_device(bench)
    models = [(TINY, (1,))] if tiny else [(model_named(name), degrees) for name, degrees in MODELS[kind]]
    found = []
    for model, degrees in models:
        batches = fitting(BATCHES[kind], max(LENGTHS[kind]), model, measured.memory)
        found += [measure_model(bench, model, tp, batches, LENGTHS[kind]) for tp in degrees]
        if kind == "cuda":
            torch.cuda.empty_cache()
    table = ProfileTable(measured, PRECISION[kind], 1, tuple(found))
    path = out.with_suffix(".profile.json")
    table.write(path)
    return {
        "profile": path.name,
        "models": [f"{each.model.name} tp{each.tp}" for each in found],
        "flops": measured.flops,
        "bandwidth": measured.bandwidth,
        "memory": measured.memory,
    }


def fitting(batches: tuple[int, ...], length: int, model: Model, memory: float) -> tuple[int, ...]:
    """Return the batches whose logits at `length` fit the device; the smallest batch in any case."""
    most = PART_OF_MEMORY * memory / (LOGIT_BYTES * length * model.vocabulary)
    return tuple(batch for batch in batches if batch <= max(most, batches[0]))
