"""Measure whole PPO steps whose critic, as large as the actor, learns on a device of its own while the next step
generates.

Real verl with two FSDP2 ranks and two vLLM replicas; replica, rank and critic of the same number are
pinned to one core. Arms:

- stock: verl's own trainer, at our pace of looking at the rollout; actor, critic and replicas on both devices;
- serial (control): the critic on the second device, where nothing generates, one update after the other;
- deferred: the same placement, `fuse.placement.defer=true`;
- inference: deferred, with reference and old log-probs on a slice of the second device, and values on the critic's
  lane, while the first device generates.

Every arm is a run of its own; step n of each generates the same lengths, which are forced: many short responses and one
long one. The first step, which loads and compiles, and the last, which waits for its own critic, are left out. Ratios
are of sums of seconds over the steps of all rounds (stock over the arm), their intervals bootstraps over steps of the
same number in the same round (95 %). `predicted_ratio` takes the control's steps, and hides each one's update of the
critic behind the next generation, as far as the second device's core was idle meanwhile: driver and queue share two
cores with the devices here. `predicted_with_idle_core` is the prediction for a host with cores of its own.

    python -m ci.bench.placement [--rounds 2] [--steps 10] [--keep DIRECTORY]
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ci.bench import interstage
from ci.bench.support.runs import SEED, in_folder, parser, planned_steps, ratio, to_and_fro
from verl_fuse.cli.run import BASELINE

STOCK, SERIAL, DEFERRED, INFERENCE = "stock", "serial", "deferred", "inference"
PLACED = (
    "fuse.placement.critic={first:1,devices:1}",
    # The replica on the critic's device does not generate.
    "fuse.elastic.enabled=true",
    "fuse.elastic.max_replicas=1",
    "fuse.observe.progress=false",
    "fuse.observe.perfetto=false",
    "fuse.observe.html=false",
)
ARMS: dict[str, tuple[str, ...]] = {
    STOCK: BASELINE,
    SERIAL: PLACED,
    DEFERRED: (*PLACED, "fuse.placement.defer=true"),
    INFERENCE: (
        *PLACED,
        "fuse.placement.defer=true",
        "fuse.interstage.enabled=true",
        "fuse.interstage.layout=slices",
    ),
}
PROMPTS, SAMPLES_PER_PROMPT = 4, interstage.SAMPLES_PER_PROMPT
SAMPLES = PROMPTS * SAMPLES_PER_PROMPT
# Response tokens: of a few samples, and of all others up to. Generation is 40 % of a step of stock verl then.
LONG_SAMPLES, LONG, SHORT = 1, 900, 48
HIDDEN, LAYERS = 512, 8
# Steps at the ends of a run that are not measured.
FIRST, LAST = 1, 1


def make_plan(steps: int, seed: int) -> dict[str, Any]:
    """See arms/bench_plan.py; every step is a group of its own."""
    rng = np.random.default_rng(SEED + seed)

    def lengths() -> list[int]:
        drawn = rng.integers(SHORT // 2, SHORT, SAMPLES)
        drawn[rng.permutation(SAMPLES)[:LONG_SAMPLES]] = LONG
        return drawn.tolist()

    return {"arms_per_group": 1, "lengths": [lengths() for _ in range(steps)], "samples_per_prompt": SAMPLES_PER_PROMPT}


def overrides(folder: Path, arm: str, home: Path, steps: int) -> list[str]:
    """Return the settings of the bench `interstage`, with the actor trained and without its features."""
    lengths = ("data.max_response_length=", "actor_rollout_ref.rollout.max_model_len=")
    left_out = ("fuse.", "trainer.critic_warmup=", "trainer.default_local_dir=", *lengths)
    common = [entry for entry in interstage.overrides(folder, steps, PROMPTS) if not entry.startswith(left_out)]
    return [
        *common,
        f"data.max_response_length={LONG}",
        f"actor_rollout_ref.rollout.max_model_len={LONG + interstage.PROMPT}",
        f"critic.ppo_mini_batch_size={PROMPTS}",
        f"trainer.default_local_dir={home / 'run'}",
        *ARMS[arm],
    ]


def run(folder: Path, arm: str, number: int, steps: int) -> list[dict[str, Any]]:
    """Return the measurements of every measured step of one run."""
    home, every = folder / f"{number}-{arm}", FIRST + steps + LAST
    settings = overrides(folder, arm, home, every)
    return planned_steps(home, "placement_arms", make_plan(every, number), settings)[FIRST:][:steps]


def predicted(steps: Sequence[dict[str, Any]], idle_core: bool) -> list[float]:
    """Return the seconds of the control's steps if each update of the critic were hidden behind the next generation:
    wholly where the critic's core has no other work, else as long as the core was idle. The first step of a run hides
    an update like its own."""

    def hidden(before: dict[str, Any], step: dict[str, Any]) -> float:
        update = (before if before["step"] == step["step"] - 1 else step)["parts"]["update_critic"]
        return min(update, step["parts"]["gen"] if idle_core else step["idle"])

    return [step["seconds"] - hidden(before, step) for before, step in zip([steps[0], *steps], steps, strict=False)]


def report(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the benchmark's JSON line."""

    def seconds(arm: str) -> list[float]:
        return [step["seconds"] for step in found[arm]]

    def foretold(idle_core: bool) -> float:
        return round(sum(seconds(STOCK)) / sum(predicted(found[SERIAL], idle_core)), 3)

    (whole, interval), (control, control_interval) = (ratio(seconds(STOCK), seconds(arm)) for arm in (DEFERRED, SERIAL))
    every = [step for steps in found.values() for step in steps]
    return {
        "bench": "placement",
        "ratio": whole,
        "interval": interval,
        "control_ratio": control,
        "control_interval": control_interval,
        "inference_ratio": ratio(seconds(STOCK), seconds(INFERENCE)),
        "inference_over_deferred": ratio(seconds(DEFERRED), seconds(INFERENCE)),
        "streamed_samples": float(np.mean([step["own"]["fuse/streamed_samples"] for step in found[INFERENCE]])),
        "predicted_ratio": foretold(idle_core=False),
        "predicted_with_idle_core": foretold(idle_core=True),
        "over_control": ratio(seconds(SERIAL), seconds(DEFERRED)),
        "steps": len(found[STOCK]),
        "seconds": {arm: round(float(np.mean(seconds(arm))), 3) for arm in found},
        "median_seconds": {arm: round(float(np.median(seconds(arm))), 3) for arm in found},
        "parts": {
            arm: {
                name: round(float(np.mean([step["parts"].get(name, 0.0) for step in steps])), 3)
                for name in steps[0]["parts"]
            }
            for arm, steps in found.items()
        },
        "critic": {
            arm: {
                name: round(float(np.mean([step["own"][f"fuse/placement_{name}_seconds"] for step in found[arm]])), 3)
                for name in ("update", "wait", "hidden")
            }
            for arm in (DEFERRED, INFERENCE)
        },
        "samples": int(sum(step["samples"] for step in every)),
        "lost": int(sum(step["lost"] for step in every)),
        "duplicated": int(sum(step["duplicated"] for step in every)),
    }


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here, and go on with those that are there")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=10, help="measured steps of a run")
    given = arguments.parse_args()

    def work(folder: Path) -> dict[str, Any]:
        if not (folder / "model").exists():
            interstage.make_task(folder, HIDDEN, LAYERS, PROMPTS)
        return report(to_and_fro(ARMS, given.rounds, lambda arm, number: run(folder, arm, number, given.steps)))

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
