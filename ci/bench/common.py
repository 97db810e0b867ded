"""Compare whole steps of the commonest public configuration, the case `common` of `ci.bench.step`: stock verl, one
feature of the update after the other, and what `fuse.preset=fast` chooses.

    python -m ci.bench.common [--task smollm2] [--arms stock fast] [--rounds 1] [--steps 11] [--layers 8] [--quick]
        [--keep DIRECTORY]

Each arm is a run of its own on the same prompts; ratios are of sums of seconds, stock over the arm, intervals 95 % over
steps. `max_difference` is the largest of a parameter between stock and `fast` after three steps of the same rollouts,
which stock records and all replay; `of_splits` that between two runs of stock with micro-batches of other sizes;
`difference` and `difference_of_splits` are the norms of these differences, over that of the change from the first step
to the last. What describes the task is explained in `ci.bench.step`, and so is `--quick`, which leaves the differences
out. With `--keep`, runs that are there already are not repeated.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ci.bench.step import (
    ALL,
    CASES,
    FAST,
    STOCK,
    Size,
    Steps,
    add_arms,
    add_size,
    compared,
    described,
    of,
    overrides,
    run,
    shares,
    size_of,
    task_in,
    told_of,
    validation,
)
from ci.bench.support.runs import in_folder, launch, packed, parser, to_and_fro
from ci.upstream.ab.record import PARAMETERS, quantities

COMMON = CASES["common"]
# The arms of the case that are run, by the feature that each adds.
ARMS = {STOCK: STOCK, "balance": "balance", "old_log_prob": "skip_old_log_prob", "response_logits": ALL, FAST: FAST}
# Steps of the same rollouts, and the arms that compute them: the first generates (a replay draws new uids, and so other
# mini-batches), the last has micro-batches of other sizes.
REPLAYED = 3
RECORDED, SPLIT = "recorded", "split"
OF_REPLAY = {RECORDED: STOCK, STOCK: STOCK, FAST: FAST, SPLIT: STOCK}


def differences(folder: Path, task: Path, size: Size) -> dict[str, float]:
    """Return what training on the same rollouts makes of the parameters, `fast` beside stock and stock beside stock."""
    for arm, rung in OF_REPLAY.items():
        home = folder / f"replay-{arm}"
        if (home / "ended").exists():
            continue
        settings = overrides(COMMON, rung, task, home, replace(size, steps=REPLAYED - 1), 0)
        settings += packed(size.task.tokens * 3 // 4) if arm == SPLIT else ()
        settings += ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.experiment_name=replay"]
        settings += ["skip.rollout_tq.enable=true", f"skip.rollout_tq.steps={list(range(1, REPLAYED + 1))}"]
        settings += [f"skip.rollout_tq.dump_dir={folder / 'rollouts'}"]
        home.mkdir(parents=True, exist_ok=True)
        recipe, numbers = size.task.recipe.format(COMMON.algorithm), str(home / "numbers")
        launch(home, "step_recorder", settings, home / "run.log", recipe, STEP_RECORD_DIR=numbers)
        (home / "ended").write_text(json.dumps(settings))
    stock, fast, split = (dict(_parameters(folder / f"replay-{arm}", REPLAYED)) for arm in (STOCK, FAST, SPLIT))
    before = dict(_parameters(folder / f"replay-{STOCK}", 1))
    changed = _norm(stock, before)
    return {
        "max_difference": max(float(np.abs(stock[name] - fast[name]).max()) for name in stock),
        "of_splits": max(float(np.abs(stock[name] - split[name]).max()) for name in stock),
        "difference": round(_norm(stock, fast) / changed, 4),
        "difference_of_splits": round(_norm(stock, split) / changed, 4),
    }


def _parameters(home: Path, step: int) -> Iterator[tuple[str, np.ndarray]]:
    for name, quantity in quantities(home / "numbers", step).items():
        if name.endswith(PARAMETERS):
            yield from quantity.items()


def _norm(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Return the norm of the difference of all parameters."""
    return float(np.sqrt(sum(np.square(one[name] - other[name], dtype=np.float64).sum() for name in one)))


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here, and go on with those that are there")
    add_size(arguments)
    add_arms(arguments, ARMS, "with stock; default: all")
    arguments.set_defaults(epoch=None)
    given = arguments.parse_args()
    size, rounds = size_of(given, arguments)
    wanted = {STOCK, FAST} if given.quick else {STOCK, *(given.arms or ARMS)}

    def work(folder: Path) -> dict[str, Any]:
        task = task_in(folder, size)

        def steps(arm: str, number: int) -> Steps:
            home = folder / f"{number}-{arm}"
            return run(home, size, COMMON, overrides(COMMON, ARMS[arm], task, home, size, number))

        found = to_and_fro([arm for arm in ARMS if arm in wanted], rounds, steps)
        stock, every = found[STOCK], [step for steps in found.values() for step in steps]
        ratios = {arm: compared(stock, steps) for arm, steps in found.items() if arm != STOCK}
        return {
            "bench": "common",
            **told_of(given, size, rounds),
            "arms": {arm: ratio["ratio"] for arm, ratio in ratios.items()},
            "intervals": {arm: ratio["interval"] for arm, ratio in ratios.items()},
            **({"interval": ratios[FAST]["interval"], **described(stock, found[FAST])} if FAST in ratios else {}),
            **validation(found),
            "lost": int(sum(of(every, "lost"))),
            "duplicated": int(sum(of(every, "duplicated"))),
            "steps": len(stock),
            "tokens": {arm: int(sum(of(steps, "tokens"))) for arm, steps in found.items()},
            "shares": {arm: shares(steps) for arm, steps in found.items()},
            **(differences(folder, task, size) if FAST in ratios and not given.quick else {}),
        }

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
