"""Runs one row of the table through real verl, and stock verl in the same setting where a bound comes from it."""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acceptance import RECIPE
from pair_lengths import LONGEST
from pair_recorder import GAP
from safetensors.torch import load_file, save_file
from table import LATER, LONG_LIMIT, Row, default_row, sampling_of, settings_of
from verl_runs import SMALL, SMALL_CRITIC, Finished, make_task, run

HERE = Path(__file__).parent
# The recipe whose task has a calculator.
TOOL_RECIPE = "grpo-tools-cpu"
STEPS = 2
# Lines of the log of a run that failed that are kept.
LAST = 60
BASE = (
    *SMALL,
    *SMALL_CRITIC,
    "actor_rollout_ref.rollout.agent.default_agent_loop=pairs",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    f"data.max_response_length={LONGEST}",
    f"actor_rollout_ref.rollout.max_model_len={LONGEST + 16}",
    f"reward.custom_reward_function.path={HERE / 'pair_lengths.py'}",
    "trainer.logger=[file]",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
)
# Only what is theirs of verl-fuse: a page and a trace per step cost time, and other tests read them.
OURS = ("fuse.observe.html=false", "fuse.observe.perfetto=false", "fuse.observe.progress=false")


@dataclass(frozen=True)
class Done:
    """What a row's run left: exit code, seconds, records and metrics by step, and the end of its log if it failed."""

    row: Row
    code: int
    seconds: float
    records: dict[str, dict[str, Any]]
    metrics: dict[str, dict[str, float]]
    accounts: dict[str, dict[str, Any]]
    log: str = ""


def name_of(row: Row) -> str:
    """A short name that only these values have; a factor that joined later is named where it is not at its first."""
    plain = default_row()
    named = {name: value for name, value in row.items() if name not in LATER or value != plain[name]}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:10]


def hydra(row: Row) -> list[str]:
    """The row's settings as overrides."""
    return [f"++{key}={_text(value)}" for key, value in settings_of(row).items()]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(each)}" for key, each in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def run_row(home: Path, row: Row, forks: Mapping[str, str], *, more: Sequence[str] = (), stock: bool = False) -> Done:
    """Two steps of a row in `home` with `more` overrides, its processes forks of the server with the variables `forks`;
    a `resumed` row is stopped after the first one's checkpoint and started again."""
    name = f"{'stock' if stock else 'row'}-{name_of(row)}"
    shutil.rmtree(home / name, ignore_errors=True)
    shutil.rmtree(home / f"{name}.numbers", ignore_errors=True)
    begun = time.monotonic()
    ends = (1, STEPS) if row["recovery"] == "resumed" else (STEPS,)
    metrics: dict[str, dict[str, float]] = {}
    for last in ends:
        done = run(
            home,
            RECIPE,
            *BASE,
            f"task_dir={long_task(home, tied=row['engine'] == 'fused kernels', tools=row['agent'] == 'tools')}",
            *(() if stock else OURS),
            *hydra(row),
            *more,
            f"trainer.total_training_steps={last}",
            name=name,
            baseline=stock,
            record=home / f"{name}.numbers",
            recorder="pair_recorder",
            folders=(HERE,),
            forks=forks,
            variables={"PAIR_SAMPLING": json.dumps(sampling_of(row))},
        )
        if done.code != 0:
            break
        metrics |= {str(step): values for step, values in done.metrics.items()}
    shutil.rmtree(home / name / f"global_step_{STEPS}", ignore_errors=True)
    return Done(row, done.code, round(time.monotonic() - begun, 1), records(home / f"{name}.numbers"), metrics,
                {str(step): account for step, account in done.accounts().items()},
                _end(done) if done.code else "")  # fmt: skip


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """What pair_recorder.py wrote, by step."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("step_*.json"))]
    return {str(record["step"]): record for record in found}


def _end(done: Finished) -> str:
    return "\n".join(done.output.splitlines()[-LAST:])


def long_task(home: Path, *, tied: bool, tools: bool) -> Path:
    """The recipe's task, or the one with a calculator (`tools`), with a model that may be asked for LONG_LIMIT tokens.
    A `tied` one has no output layer of its own: with one, verl's fused kernels fail on FSDP2 (verl 0.9.1: a Tensor
    meets a DTensor), in stock verl too."""
    made = home / f"tasks/pairs{'-tools' if tools else ''}{'-tied' if tied else ''}"
    if not made.exists():
        make_task(home, TOOL_RECIPE if tools else RECIPE)
        shutil.copytree(home / ("tasks/euclid-tools" if tools else "tasks/euclid"), made)
        config = made / "model/config.json"
        settings = {**json.loads(config.read_text()), "max_position_embeddings": 2 * LONG_LIMIT}
        config.write_text(json.dumps(settings | ({"tie_word_embeddings": True} if tied else {})))
        if tied:
            weights = made / "model/model.safetensors"
            save_file({k: v for k, v in load_file(weights).items() if k != "lm_head.weight"}, weights, {"format": "pt"})
    return made


def stock_gap(done: Done) -> float:
    """Largest difference of a token's probability between rollout and trainer, of a run of stock verl."""
    return max(step[GAP] for step in done.metrics.values())
