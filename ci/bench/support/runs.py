"""The benches with real verl share these parts: a run of a recipe with a module of arms/, overrides of packed rows, the
command line, and intervals."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_fuse.cli import child
from verl_fuse.cli.recipes import find_recipe
from verl_fuse_cpu.environment import environment as cpu_environment

ARMS_FOLDER = Path(__file__).parents[1] / "arms"
RECORDER_FOLDER = Path(__file__).parents[2] / "upstream/recorder"
SEED = 0
DRAWS = 10_000


def launch(
    folder: Path, module: str, overrides: Sequence[str], log: Path, recipe: str = "ppo-cpu", **variables: str
) -> None:
    """Run a recipe with the external `module` of arms/; all its processes end with the run, and a run that fails ends
    this process."""
    command = [sys.executable, "-P", "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", str(find_recipe(recipe).folder), "--config-name", "config", *overrides]
    environment = {
        **os.environ,
        **cpu_environment(),
        "VERL_FUSE_HOME": str(folder),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VERL_USE_EXTERNAL_MODULES": module,
        "BENCH_PLAN": str(folder / "plan.json"),
        "PYTHONPATH": os.pathsep.join([str(ARMS_FOLDER), str(RECORDER_FOLDER), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }
    with log.open("wb") as output:
        code = child.run(command, environment, output).code
    if code:
        sys.exit(f"the run ended with exit code {code}:\n{log.read_text(errors='replace')[-3000:]}")


def packed(tokens: int) -> tuple[str, ...]:
    """Return the overrides of rows without padding, in micro-batches of so many tokens."""
    return (
        "actor_rollout_ref.model.use_remove_padding=true",
        "critic.model.use_remove_padding=true",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
        f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={tokens}",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
        f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={tokens}",
        "critic.use_dynamic_bsz=true",
        # verl 0.9.1 reads this key alone for the critic, and packs 32,768 tokens without it: a mask over all of them,
        # which attention on a CPU needs, then makes the critic's update up to twice as long as the actor's.
        f"++critic.ppo_infer_max_token_len_per_gpu={tokens}",
    )


def bootstrap(*rows: Sequence[float]) -> np.ndarray:
    """Return (draws, rows) sums of `rows`, of columns drawn with replacement: items of a column belong together."""
    columns = np.array(rows, dtype=float)
    drawn = np.random.default_rng(SEED).integers(0, columns.shape[1], (DRAWS, columns.shape[1]))
    return columns[:, drawn].sum(axis=2).T


def interval(values: np.ndarray, level: float = 0.95) -> list[float]:
    """Return the middle `level` of bootstrapped values."""
    return [round(float(bound), 3) for bound in np.quantile(values, [(1 - level) / 2, (1 + level) / 2])]


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, list[float]]:
    """Return sum over sum, and the 95 % interval, where items of the same place belong together."""
    sums = bootstrap(over, under)
    return round(float(np.sum(over) / np.sum(under)), 3), interval(sums[:, 0] / sums[:, 1])


def ratio_of_arms(records: Sequence[dict[str, Any]], over: str, under: str) -> tuple[float, list[float]]:
    """Return the ratio of the seconds of two arms' steps; the steps of a group belong together."""
    first, second = ([record["seconds"] for record in records if record["arm"] == arm] for arm in (over, under))
    return ratio(first, second)


def planned_steps(home: Path, module: str, plan: dict[str, Any], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the records of every step of a run in `home` with a plan (arms/bench_plan.py); a run that has ended there
    is not repeated."""
    measurements = home / "steps.jsonl"
    if not (home / "ended").exists():
        # An earlier run broke off.
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        (home / "plan.json").write_text(json.dumps(plan))
        launch(home, module, overrides, home / "run.log", STEP_BENCH=str(measurements))
        (home / "ended").touch()
    return [json.loads(line) for line in measurements.read_text().splitlines()]


def to_and_fro(arms: Iterable[str], rounds: int, run: Callable[[str, int], list[Any]]) -> dict[str, list[Any]]:
    """Return all that `run(arm, round)` returned, by arm. Every other round takes the arms in reverse, so that a drift
    of the machine does not always meet the same arm."""
    names = list(arms)
    found: dict[str, list[Any]] = {arm: [] for arm in names}
    for number in range(rounds):
        for arm in names if number % 2 == 0 else reversed(names):
            found[arm] += run(arm, number)
            print(f"round {number}: {arm}", file=sys.stderr, flush=True)
    return found


def in_folder(keep: Path | None, work: Callable[[Path], Any], again: bool = False) -> Any:
    """Call `work` with the folder `keep`, or with a temporary folder; print the result as JSON, and return it. `again`:
    `keep` may be there already."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=again)
        found = work(keep.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = work(Path(folder))
    print(json.dumps(found))
    return found


def parser(description: str | None, keep: str) -> argparse.ArgumentParser:
    """Return a bench's parser, with the arguments that all benches have in common."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--keep", type=Path, help=keep)
    return made


def command_line(
    description: str | None, groups: int, run: Callable[[Path, int], Any], report: Callable[[Any], dict[str, Any]]
) -> None:
    """Run a bench whose arms take turns: `run` makes `--groups` groups of steps in a folder, and the `report` of them
    is printed."""
    arguments = parser(description, "leave plan, timelines and measurements here")
    arguments.add_argument("--groups", type=int, default=groups)
    given = arguments.parse_args()
    in_folder(given.keep, lambda folder: report(run(folder, given.groups)))
