"""Compare the rewards of whole runs without and with features of verl-fuse, over several seeds: do they learn the same?

Each seed trains the recipe twice, on the same prompts in the same order: without the features, and with them; the
trainer is the same. A run's figure is the mean of its steps' mean rewards over its last steps; the interval is that of
Student's t for the mean of the seeds' differences (90 %). A seed sets the order of the prompts and the engines'
sampling. Runs whose results are in the directory already are not repeated, so that a comparison can be made in parts.
The directory's `curves.md` has the mean reward of every fifth of each arm's steps.

    python -m ci.bench.learning [--recipe grpo-cpu] [--seeds 0 1 2 3 4] [--steps 60] [--last 20] [--keep DIRECTORY]
        [FEATURE_OVERRIDE ...]
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ci.bench.support.runs import in_folder, parser
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.report import read_metrics
from verl_fuse.cli.run import execute, plan

FEATURES = ("fuse.speculation.enabled=true",)
ARMS = ("without", "with")
REWARD, MISSING = "critic/score/mean", "fuse/samples_missing"
PARTS = 5
# The 95 % quantiles of Student's t, for one degree of freedom, for two, ...
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


def overrides(folder: Path, seed: int, steps: int) -> list[str]:
    return [
        f"task_dir={folder / 'task'}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={42 + 100 * seed}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        "fuse.observe.progress=false",
        "fuse.observe.perfetto=false",
        "fuse.observe.html=false",
    ]


def rewards(folder: Path, recipe: str, seed: int, arm: str, steps: int, features: Sequence[str]) -> list[float]:
    """Return the mean reward of every step of one run; make the run if its results are not there."""
    name = f"{recipe}-{seed}-{arm}"
    kept = folder / f"{name}.json"
    if not kept.exists():
        settings = [f"trainer.experiment_name={name}", *overrides(folder, seed, steps)]
        launch = plan(
            find_recipe(recipe), [*settings, *(features if arm == "with" else ())], baseline=False, home=folder
        )
        if code := execute(launch):
            sys.exit(f"the run ended with exit code {code}: {launch.log}")
        kept.write_text(json.dumps(trained(dict(read_metrics(launch.metrics)), steps)))
    found = json.loads(kept.read_text())
    if len(found) != steps:
        sys.exit(f"{kept}: has {len(found)} steps, {steps} are asked for")
    return found


def trained(metrics: Mapping[int, Mapping[str, Any]], steps: int) -> list[float]:
    """Return the mean reward of steps 1, 2, ...; every sample must have been trained."""
    lost = [step for step in range(1, steps + 1) if metrics[step][MISSING]]
    if lost:
        sys.exit(f"samples are missing in the steps {lost}")
    return [metrics[step][REWARD] for step in range(1, steps + 1)]


def report(curves: Mapping[str, Mapping[int, Sequence[float]]], last: int) -> dict[str, Any]:
    """Return the difference with - without of the mean reward over the last steps: its mean over seeds and 90 %
    interval."""
    ends = {arm: np.array([np.mean(curve[-last:]) for curve in curves[arm].values()]) for arm in ARMS}
    differences = ends["with"] - ends["without"]
    half = T_95[len(differences) - 2] * differences.std(ddof=1) / np.sqrt(len(differences))
    mean = differences.mean()
    return {
        "seeds": len(differences),
        "last": last,
        **{f"reward_{arm}": round(float(ends[arm].mean()), 4) for arm in ARMS},
        "difference": round(float(mean), 4),
        "differences": [round(float(difference), 4) for difference in differences],
        "interval_90": [round(float(mean - half), 4), round(float(mean + half), 4)],
    }


def table(curves: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    """Return the mean reward over seeds by parts of the run, a row of Markdown for each arm."""
    means = {arm: np.mean(list(curves[arm].values()), axis=0) for arm in ARMS}
    parts = np.array_split(np.arange(1, len(means["with"]) + 1), PARTS)
    head = ["steps", *(f"{part[0]} to {part[-1]}" for part in parts)]
    rows = [[arm, *(f"{means[arm][part - 1].mean():.3f}" for part in parts)] for arm in ARMS]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here")
    arguments.add_argument("features", nargs="*", default=FEATURES, metavar="FEATURE_OVERRIDE")
    arguments.add_argument("--recipe", default="grpo-cpu")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--last", type=int, default=20)
    args = arguments.parse_args()
    if not 2 <= len(set(args.seeds)) == len(args.seeds) <= len(T_95) + 1:
        arguments.error(f"--seeds {args.seeds}: 2 to {len(T_95) + 1} different ones")
    if not 0 < args.last <= args.steps:
        arguments.error(f"--last {args.last}: 1 to --steps {args.steps}")

    def compare(folder: Path) -> dict[str, Any]:
        curves: dict[str, dict[int, list[float]]] = {arm: {} for arm in ARMS}
        for number, seed in enumerate(args.seeds):
            # Each arm goes first as often as the other.
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                curves[arm][seed] = rewards(folder, args.recipe, seed, arm, args.steps, args.features)
        (folder / "curves.md").write_text(table(curves))
        said = {"bench": "learning", "features": list(args.features), "recipe": args.recipe}
        return {**said, **report(curves, args.last)}

    in_folder(args.keep, compare, again=True)


if __name__ == "__main__":
    main()
