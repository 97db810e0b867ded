"""Make the directory of the Euclid task: train.parquet, validation.parquet, model/ (weights and tokenizer) and
manifest.json; with a calculator also tools.py, which verl loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_fuse_cpu.task.calculator import TOOL_FILE, TOOL_SOURCE, transcript
from verl_fuse_cpu.task.euclid import Pair, all_pairs, draw, held_out
from verl_fuse_cpu.task.folder import PARTS, make_folder
from verl_fuse_cpu.task.parameters import DATA_SOURCE, Parameters


def make(out: Path, parameters: Parameters, say: Callable[[str], None] = print) -> bool:
    """Make the task in `out` unless the task is there; return True if the task was made. Raises a FuseError with the
    reason why `out` cannot be used."""
    parts = (*PARTS, TOOL_FILE) if parameters.tools else PARTS
    return make_folder(out, parameters.manifest(), lambda folder: _build(folder, parameters, say), parts)


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


def row(pair: Pair, split_name: str, index: int, tools: bool = False) -> dict[str, Any]:
    """Return one problem in the columns of verl's RLHFDataset; with `tools` a calculator subtracts."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": pair.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": transcript(pair) if tools else pair.trace},
        "extra_info": {"split": split_name, "index": index},
    }
