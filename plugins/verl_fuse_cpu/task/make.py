"""Make the task's directory: train.parquet, validation.parquet, model/ (weights and tokenizer) and manifest.json; with
a calculator also tools.py, which verl loads.

Invariants (tests/unit/task/test_make.py):
- a directory that holds this task with the same parameters is left alone;
- the directory appears whole or not at all: `make` builds the directory beside its place and renames it;
- a directory that holds anything else is refused, never overwritten.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import load_json
from verl_fuse_cpu.task.calculator import TOOL_FILE, TOOL_SOURCE, transcript
from verl_fuse_cpu.task.euclid import Pair, all_pairs, draw, held_out
from verl_fuse_cpu.task.parameters import DATA_SOURCE, Parameters

MANIFEST = "manifest.json"


def make(out: Path, parameters: Parameters, say: Callable[[str], None] = print) -> bool:
    """Make the task in `out` unless the task is there; return True if the task was made. Raises a FuseError with the
    reason why `out` cannot be used."""
    existing = read_manifest(out)
    if existing == parameters.manifest():
        return False
    if existing is None and out.exists() and any(out.iterdir()):
        raise FuseError(f"{out} holds files but no {MANIFEST} of this task: name an empty or new directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.parent / f".{out.name}-{os.getpid()}"
    building.mkdir()
    try:
        _build(building, parameters, say)
        if out.exists():
            shutil.rmtree(out)
        os.replace(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return True


def read_manifest(out: Path) -> dict[str, Any] | None:
    """Return the manifest in `out`, None without one; raises FuseError when the manifest cannot be read."""
    path = out / MANIFEST
    if out.exists() and not out.is_dir():
        raise FuseError(f"{out} is a file; a directory is needed")
    if not path.exists():
        return None
    try:
        return load_json(path)
    except FuseError as error:
        raise FuseError(f"{error}: delete {out} to make it again") from error


def _build(out: Path, parameters: Parameters, say: Callable[[str], None]) -> None:
    import pandas

    from verl_fuse_cpu.task.tokenizer import build_tokenizer
    from verl_fuse_cpu.task.warm_start import train

    tools = parameters.tools

    kept, unseen = held_out(all_pairs(parameters.largest), parameters.seed)
    for name, pairs, count in (("train", kept, parameters.train), ("validation", unseen, parameters.validation)):
        problems = draw(pairs, count, parameters.tail_exponent, parameters.seed)
        rows = [row(pair, name, i, tools) for i, pair in enumerate(problems)]
        pandas.DataFrame(rows).to_parquet(out / f"{name}.parquet")
        say(f"task: {len(problems)} {name} problems")
    tokenizer = build_tokenizer(tools)
    model = train(tokenizer, kept, parameters.warm_start, parameters.seed, say, parameters.layers, tools)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    if tools:
        (out / TOOL_FILE).write_text(TOOL_SOURCE)
    (out / MANIFEST).write_text(json.dumps(parameters.manifest(), indent=2) + "\n")


def row(pair: Pair, split_name: str, index: int, tools: bool = False) -> dict[str, Any]:
    """Return one problem in the columns of verl's RLHFDataset; with `tools` a calculator subtracts."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": pair.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": transcript(pair) if tools else pair.trace},
        "extra_info": {"split": split_name, "index": index},
    }
