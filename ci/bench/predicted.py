"""Predict the stages of our own runs on real verl, and what the features that `verl-fuse advise` names do to a step;
then measure both: FSDP2 and vLLM on two ranks without an accelerator.

    python -m ci.bench.predicted [--recipe grpo-cpu] [--steps 8] [--keep DIRECTORY]

Each recipe runs in observe mode with its own batch and with twice as many prompts. Of each run the stages are predicted
from a profile of the machine, with the floors of the software read off the run of the other size: `stages` has seconds
[measured, predicted], medians over its steps. `advised` is what `verl-fuse advise` says of the run, in times as fast as
observe mode: `predicted`, and `measured` by a run with these features. Errors are |predicted / measured - 1|; of the
advised sets those count that switch something on, and whose prediction is no bound (`at_most`). With `--keep`, what is
there already is not repeated.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ci.bench.support.runs import in_folder, parser
from ci.bench.tune import ALIKE, told
from verl_fuse.cli.profile import cost_of, read_run, with_floors
from verl_fuse.cost.floors import stage_errors
from verl_fuse.cost.table import ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.spec.composed import MODEL, getter
from verl_fuse.spec.run_config import find_config

# Prompts of a step, by the recipe's own batch.
BATCHES = {"grpo-cpu": 8, "dapo-cpu": 8, "grpo-tools-cpu": 8, "ppo-cpu": 16}
TIMES = (1, 2)
GRID = ("--batches", "1,4,16", "--lengths", "16,64,256,1024", "--beside", "1")


def recipe_cases(folder: Path, recipe: str, steps: int) -> list[dict[str, Any]]:
    """Return the cases of a recipe, one for each size."""
    home = folder / f"{recipe}-{steps}"
    home.mkdir(exist_ok=True)
    sizes = {f"x{times}": times * BATCHES[recipe] for times in TIMES}
    for name, prompts in sizes.items():
        run(home, recipe, name, prompts, steps)
    config = find_config(home / "x1")
    assert config is not None
    profile = home / "profile.json"
    told(home, "profile", "profile", "--model", str(getter(config)(f"{MODEL}.path")), *GRID, "--out", str(profile))
    table, runs = ProfileTable.read(profile), {name: read_run(home / name) for name in sizes}
    cases = []
    for name, prompts in sizes.items():
        others = [each for other, each in runs.items() if other != name]
        # The cluster must have room for both.
        cost = cost_of(with_floors(table, others), list(runs.values()))
        found = stage_errors(runs[name], table.models[0].model, cost)
        stages = {each.stage: [round(each.measured, 4), round(each.predicted, 4)] for each in found}
        cases.append(
            {
                "recipe": recipe,
                "prompts": prompts,
                "stages": stages,
                "advised": advised(home, recipe, name, prompts, steps),
            }
        )
    return cases


def advised(home: Path, recipe: str, name: str, prompts: int, steps: int) -> dict[str, Any]:
    """Return what is advised of a run, and what it does there."""
    advice = json.loads(told(home, f"advice-{name}", "advise", str(home / name), "--json"))
    told_of = advice["advised"]
    said = {"features": advice["features"], "predicted": round(told_of["speedup"], 3), "at_most": told_of["at_most"]}
    if not advice["features"]:
        return {**said, "measured": None, "interval": None}
    run(home, recipe, f"{name}-advised", prompts, steps, *advice["overrides"])
    compare = ("compare", str(home / name), str(home / f"{name}-advised"), "--json")
    found = json.loads(told(home, f"compared-{name}", *compare))["speedup"]
    return {**said, "measured": round(found["value"], 3), "interval": [found["low"], found["high"]]}


def run(home: Path, recipe: str, name: str, prompts: int, steps: int, *overrides: str) -> None:
    """Make a run of the recipe; features are off but for those of the overrides."""
    sizes = (f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}")
    named = (f"trainer.experiment_name={name}", f"trainer.total_training_steps={steps + 1}")
    told(home, f"run-{name}", "run", recipe, "fuse=default", *sizes, *ALIKE, *named, *overrides)


def error_of(measured: float, predicted: float) -> float:
    return abs(predicted / measured - 1)


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the bench's JSON line."""
    stages = [error_of(*pair) for each in cases for pair in each["stages"].values()]
    sets = [error_of(each["advised"]["measured"], each["advised"]["predicted"]) for each in cases if _counts(each)]
    return {
        "bench": "predicted",
        "cases": cases,
        "stages": {"median_error": round(median(stages), 3), "worst": round(max(stages), 3)},
        "advised": {"median_error": round(median(sets), 3), "worst": round(max(sets), 3)} if sets else None,
    }


def _counts(case: Mapping[str, Any]) -> bool:
    return case["advised"]["measured"] is not None and not case["advised"]["at_most"]


def main() -> None:
    arguments = parser(__doc__, "leave runs here, and go on with those that are there")
    arguments.add_argument("--recipe", choices=list(BATCHES), action="append", help="may be given again; all")
    arguments.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    given = arguments.parse_args()

    def work(folder: Path) -> dict[str, Any]:
        try:
            return summary(
                [case for recipe in given.recipe or BATCHES for case in recipe_cases(folder, recipe, given.steps)]
            )
        except FuseError as error:
            sys.exit(str(error))

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
