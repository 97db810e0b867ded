"""Compare whole steps of the commonest public configuration, the case `common` of `ci.bench.step`: stock verl, one
feature of the update after the other, and what `fuse.preset=fast` chooses.

    python -m ci.bench.common [--rounds 1] [--steps 11] [--layers 8] [--keep DIRECTORY]

Each arm is a run of its own on the same prompts; ratios are of sums of seconds, stock over the arm, intervals 95 % over
steps. With `--keep`, runs that are there already are not repeated.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ci.bench.step import ALL, CASES, LAYERS, STOCK, TASK, Size, Steps, compared, of, overrides, run, shares
from ci.bench.support.runs import in_folder, parser, to_and_fro
from verl_fuse_cpu.task.make import make

COMMON = CASES["common"]
FAST = "fast"
# The features of each arm are those of a rung of the case's ladder, and the preset alone.
ARMS = {
    STOCK: (COMMON, STOCK),
    "balance": (COMMON, "balance"),
    "old_log_prob": (COMMON, "skip_old_log_prob"),
    "response_logits": (COMMON, ALL),
    FAST: (replace(COMMON, features={"preset": ("fuse.preset=fast",)}), ALL),
}


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here, and go on with those that are there")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=11, help="measured steps of a run")
    arguments.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    given = arguments.parse_args()
    size = Size(given.steps, 3, given.layers)

    def work(folder: Path) -> dict[str, Any]:
        task = folder / f"task-{size.layers}"
        make(task, replace(TASK, layers=size.layers), say=lambda line: print(line, file=sys.stderr))

        def steps(arm: str, number: int) -> Steps:
            home, (case, rung) = folder / f"{number}-{arm}", ARMS[arm]
            return run(home, case, overrides(case, rung, task, home, size, number))

        found = to_and_fro(list(ARMS), given.rounds, steps)
        stock, every = found[STOCK], [step for steps in found.values() for step in steps]
        ratios = {arm: compared(stock, found[arm]) for arm in ARMS if arm != STOCK}
        return {
            "bench": "common",
            "arms": {arm: ratio["ratio"] for arm, ratio in ratios.items()},
            "intervals": {arm: ratio["interval"] for arm, ratio in ratios.items()},
            "interval": ratios[FAST]["interval"],
            "lost": int(sum(of(every, "lost"))),
            "duplicated": int(sum(of(every, "duplicated"))),
            "steps": len(stock),
            "tokens": {arm: int(sum(of(steps, "tokens"))) for arm, steps in found.items()},
            "shares": {arm: shares(steps) for arm, steps in found.items()},
        }

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
