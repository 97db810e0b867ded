"""Measure whole GRPO steps whose update begins on complete groups while the long tail generates (`fuse.update.stream`).

Real verl with two FSDP2 ranks and two vLLM replicas; replica and rank of the same number are pinned to one core. Arms,
each a run of its own, to and fro:

- stock: verl's own trainer, at our pace of looking at the rollout, with shards over both devices;
- copies: the same with a copy of the actor on each device, the layout of the stream;
- lean: `fuse.update.skip_old_log_prob=true` in stock's layout, which the stream includes;
- stream: copies, with the stream.

Step n of each generates the same lengths, which are forced: one long response, and many whose lengths are lognormal.
Rounds take turns with lengths of a group that are independent and lengths that are alike (`CORRELATIONS`). The first
steps, which load and compile, are left out. Ratios are of sums of seconds over the steps of all rounds, their intervals
bootstraps over steps of the same number in the same round (95 %): `ratio` is the faster of stock's two layouts over the
stream, `over_lean` is the gain of the stream beside the pass that is left out. `bounds` are seconds of a step that keep
it from more: the generation that grew, the update that was left, groups that were complete and not streamed.
`generation_over_copies` is the generation of the stream over that of its layout without a stream.

    python -m ci.bench.update_stream [--rounds 2] [--steps 8] [--keep DIRECTORY]
"""

from pathlib import Path
from typing import Any

import numpy as np

from ci.bench import interstage, update
from ci.bench.support.runs import SEED, in_folder, parser, planned_steps, ratio, to_and_fro
from verl_fuse.cli.run import BASELINE

STOCK, COPIES, LEAN, STREAM = "stock", "copies", "lean", "stream"
ONE_DEVICE = "actor_rollout_ref.actor.fsdp_config.fsdp_size=1"
OURS = (
    "fuse.update.skip_old_log_prob=true",
    "fuse.observe.progress=false",
    "fuse.observe.perfetto=false",
    "fuse.observe.html=false",
)
ARMS: dict[str, tuple[str, ...]] = {
    STOCK: BASELINE,
    COPIES: (*BASELINE, ONE_DEVICE),
    LEAN: OURS,
    STREAM: (
        *OURS,
        ONE_DEVICE,
        "fuse.update.stream=true",
        "fuse.elastic.enabled=true",
        "fuse.elastic.release=true",
        "fuse.elastic.cut_fraction=0.75",
    ),
}
PROMPTS, SAMPLES_PER_PROMPT = 16, 8
SAMPLES = PROMPTS * SAMPLES_PER_PROMPT
# Response tokens: of one sample, and the lognormal distribution of all others, which is cut.
LONG, MEDIAN, SIGMA, SHORT = 700, 32, 0.5, 96
# Correlations are of the logarithms of lengths within a group, by round.
CORRELATIONS = (0.0, 0.8)
# Steps at the start of a run that are not measured: a rank's first streamed call builds structures that FSDP2 needs.
FIRST = 2


def correlation_of(number: int) -> float:
    """Return the correlation of lengths within a group in this round."""
    return CORRELATIONS[number % len(CORRELATIONS)]


def make_plan(steps: int, number: int) -> dict[str, Any]:
    """Return the plan of a round, see arms/bench_plan.py; every step is a group of its own, and no prompt has equal
    rewards."""
    rng, alike = np.random.default_rng(SEED + number), correlation_of(number)

    def lengths() -> list[int]:
        prompts = np.repeat(rng.standard_normal(PROMPTS), SAMPLES_PER_PROMPT)
        normal = alike**0.5 * prompts + (1 - alike) ** 0.5 * rng.standard_normal(SAMPLES)
        drawn = np.clip(MEDIAN * np.exp(SIGMA * normal), 1, SHORT).astype(int)
        drawn[rng.integers(SAMPLES)] = LONG
        return drawn.tolist()

    return {
        "arms_per_group": 1,
        "lengths": [lengths() for _ in range(steps)],
        "equal": [[] for _ in range(steps)],
        "samples_per_prompt": SAMPLES_PER_PROMPT,
    }


def overrides(folder: Path, arm: str, home: Path, steps: int) -> list[str]:
    """Return the settings of the bench `update`, with longer responses and without its features."""
    replaced = ("fuse.", "data.train_batch_size=", "data.max_response_length=", "trainer.default_local_dir=")
    replaced += (
        "actor_rollout_ref.actor.ppo_mini_batch_size=",
        "actor_rollout_ref.rollout.n=",
        "actor_rollout_ref.rollout.max_model_len=",
    )
    common = [entry for entry in update.overrides(folder, steps) if not entry.startswith(replaced)]
    return [
        *common,
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"data.max_response_length={LONG}",
        f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
        f"actor_rollout_ref.rollout.max_model_len={LONG + 16}",
        f"trainer.default_local_dir={home / 'run'}",
        *ARMS[arm],
    ]


def run(folder: Path, arm: str, number: int, steps: int) -> list[dict[str, Any]]:
    """Return the records of every measured step of one run."""
    home, every = folder / f"{number}-{arm}", FIRST + steps
    settings = overrides(folder, arm, home, every)
    found = planned_steps(home, "update_stream_arms", make_plan(every, number), settings)[FIRST:]
    return [{**step, "correlation": correlation_of(number)} for step in found]


def report(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the benchmark's JSON line."""

    def seconds(arm: str) -> list[float]:
        return [step["seconds"] for step in found[arm]]

    def mean(arm: str, part: str) -> float:
        return round(float(np.mean([step["parts"].get(part, 0.0) for step in found[arm]])), 3)

    def own(name: str, steps: list[dict[str, Any]] = found[STREAM]) -> float:
        return round(float(np.mean([step["own"][f"fuse/stream_{name}"] for step in steps])), 3)

    def generation(arm: str) -> list[float]:
        return [step["parts"]["gen"] for step in found[arm]]

    faster = min((STOCK, COPIES), key=lambda arm: sum(seconds(arm)))
    whole, interval = ratio(seconds(faster), seconds(STREAM))
    every = [step for steps in found.values() for step in steps]
    return {
        "bench": "update_stream",
        "faster_layout": faster,
        "ratio": whole,
        "interval": interval,
        "over_lean": ratio(seconds(LEAN), seconds(STREAM)),
        "over_copies": ratio(seconds(COPIES), seconds(STREAM)),
        "generation_over_copies": ratio(generation(STREAM), generation(COPIES)),
        "bounds": {
            "generation_grew": round(mean(STREAM, "gen") - mean(faster, "gen"), 3),
            "update_left": mean(STREAM, "update_actor"),
            "missed_tokens": own("missed_tokens"),
        },
        "streamed": {
            str(alike): {
                name: own(name, [step for step in found[STREAM] if step["correlation"] == alike])
                for name in ("tokens", "complete_tokens", "missed_tokens", "seconds", "calls")
            }
            for alike in sorted({step["correlation"] for step in found[STREAM]})
        },
        "fallbacks": max(step["own"]["fuse/stream_fallbacks"] for step in found[STREAM]),
        "steps": len(found[STOCK]),
        "seconds": {arm: round(float(np.mean(seconds(arm))), 3) for arm in found},
        "parts": {
            arm: {part: mean(arm, part) for part in ("gen", "old_log_prob", "update_actor", "update_weights")}
            for arm in found
        },
        "samples": int(sum(step["samples"] for step in every)),
        "lost": int(sum(step["lost"] for step in every)),
        "duplicated": int(sum(step["duplicated"] for step in every)),
    }


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here, and go on with those that are there")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    given = arguments.parse_args()

    def work(folder: Path) -> dict[str, Any]:
        if not (folder / "model").exists():
            interstage.make_task(folder, update.HIDDEN, update.LAYERS, PROMPTS)
        return report(to_and_fro(ARMS, given.rounds, lambda arm, number: run(folder, arm, number, given.steps)))

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
