"""Search verl's own settings from bad starts with `verl-fuse tune`, and run base and answer once more: observe mode,
real verl and vLLM, FSDP2 on two ranks.

    python -m ci.bench.tune [--case grpo-padded] [--budget 15] [--steps 10] [--keep DIRECTORY]

Starts that people run: rows with padding in micro-batches of one; packed rows with a budget of 256 tokens; an engine
that takes four requests at a time. `ratio` is the search's own, of its finals; `held` is that of the two runs of
`--steps` steps after it (base over answer), with its 95 % interval over steps, null where the answer is the base.
`median_error` is that of predicted against measured seconds of all trials of which something was predicted.
`best_place` is the place by prediction, among the changes that were tried `replayed` or `live`, of the one that turned
out the fastest, and their number. With `--keep`, searches and runs that are there already are not repeated.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from ci.bench.support.runs import in_folder, parser
from verl_fuse.spec.composed import ACTOR, MODEL, REFERENCE, ROLLOUT

_PASSES = (f"{ROLLOUT}.log_prob", f"{REFERENCE}.log_prob")
_PACKED = (
    f"{MODEL}.use_remove_padding=true",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=256",
    *(f"{key}_use_dynamic_bsz=true" for key in _PASSES),
    *(f"{key}_max_token_len_per_gpu=256" for key in _PASSES),
)
STARTS = {
    "padded": (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        *(f"{key}_micro_batch_size_per_gpu=1" for key in _PASSES),
    ),
    "small": _PACKED,
    "few": (f"{ROLLOUT}.max_num_seqs=4",),
}
# The critic's passes are cut by this key alone.
CRITIC = {"small": ("++critic.ppo_infer_max_token_len_per_gpu=256", "critic.model.use_remove_padding=true")}
RECIPES = {"grpo": "grpo-cpu", "ppo": "ppo-cpu"}
CASES = [f"{algorithm}-{start}" for algorithm in RECIPES for start in STARTS]
# Neither search nor runs validate or save.
ALIKE = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")


def case(folder: Path, name: str, budget: float, steps: int) -> dict[str, Any]:
    """Return one case of the benchmark's JSON line."""
    algorithm, start = name.split("-")
    recipe, home = RECIPES[algorithm], folder / f"{name}-{budget:g}-{steps}"
    home.mkdir(exist_ok=True)
    base = [*STARTS[start], *(CRITIC.get(start, ()) if algorithm == "ppo" else ())]
    found = json.loads(told(home, "tune", "tune", recipe, *base, "--budget", f"{budget:g}", "--json"))
    better = found["best"]["overrides"]
    runs = {"base": base, "best": [*base, *better]} if better else {}
    for run, settings in runs.items():
        named = (f"trainer.experiment_name={run}", f"trainer.total_training_steps={steps + 1}")
        told(home, f"run-{run}", "run", recipe, *settings, *ALIKE, *named)
    compare = ("compare", str(home / "base"), str(home / "best"), "--json")
    held = json.loads(told(home, "compared", *compare))["speedup"] if better else None
    return {
        "case": name,
        "base": found["base"]["seconds"],
        "best": found["best"]["seconds"],
        "overrides": better,
        "ratio": found["best"]["ratio"],
        "ratio_interval": found["best"]["ratio_interval"],
        "held": held,
        "verdict": found["verdict"],
        "minutes": round(found["minutes"], 1),
        **predictions(found["trials"]),
        "trials": found["trials"],
    }


def predictions(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far predictions were off, and which place they gave to the fastest trial."""
    known = [trial for trial in trials if trial["predicted_seconds"] is not None and trial["seconds"] is not None]
    errors = [abs(trial["predicted_seconds"] / trial["seconds"] - 1) for trial in known]
    places = {}
    for kind in ("replayed", "live"):
        # Later ones were made again.
        alike = {
            tuple(trial["overrides"]): trial for trial in reversed(known) if trial["replayed"] == (kind == "replayed")
        }
        if alike:
            fastest = min(alike.values(), key=lambda trial: trial["seconds"])
            before = sum(trial["predicted_seconds"] < fastest["predicted_seconds"] for trial in alike.values())
            places[kind] = [before + 1, len(alike)]
    return {"median_error": round(median(errors), 3) if errors else None, "best_place": places}


def told(home: Path, what: str, *arguments: str) -> str:
    """Return what a command of verl-fuse says in `home`; one that has ended there is not repeated."""
    said = home / f"{what}.out"
    if not said.exists():
        command = [sys.executable, "-P", "-m", "verl_fuse", *arguments]
        environment = {**os.environ, "VERL_FUSE_HOME": str(home)}
        with (home / f"{what}.log").open("wb") as log:
            done = subprocess.run(command, env=environment, cwd=home, stdout=subprocess.PIPE, stderr=log)
        if done.returncode:
            sys.exit(f"{what}: exit code {done.returncode}: {home / what}.log")
        said.write_bytes(done.stdout)
    return said.read_text()


def main() -> None:
    arguments = parser(__doc__, "leave searches and runs here, and go on with those that are there")
    arguments.add_argument("--case", choices=CASES, action="append", help="may be given again; all")
    arguments.add_argument("--budget", type=float, default=15.0, help="minutes of a search")
    arguments.add_argument("--steps", type=int, default=10, help="measured steps of a run")
    given = arguments.parse_args()

    def work(folder: Path) -> dict[str, Any]:
        cases = [case(folder, name, given.budget, given.steps) for name in given.case or CASES]
        return {"bench": "tune", "budget": given.budget, "cases": cases}

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
