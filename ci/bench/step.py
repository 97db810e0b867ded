"""Compare whole steps of stock verl with all features of verl-fuse that pay: actor, and critic, trained; FSDP2 on two
ranks, two vLLM replicas.

- grpo: without KL, 8 samples a prompt; ppo: critic, KL in the reward; common: what most public scripts run, GRPO on
  FSDP1 with a KL loss and 4 mini-batches, 8 samples a prompt (`ci.bench.common` compares the preset on it). The task is
  Euclid's (plugins/verl_fuse_cpu/task), its model trained before, at temperature 1: lengths and rewards come from the
  model.
- stock is verl's own trainer, which looks at the rollout at verl-fuse's pace. The ladder adds one feature after the
  other to verl-fuse's trainer, the ablation leaves one feature out.
- Every arm is a run of its own: a run has one engine. The runs of a round have the same prompts in the same order and
  the same seeds, another round has others; rounds go through the arms to and fro. The first step of each run, which
  loads and compiles, is left out.
- The work of verl and Ray for each sample shares the cores with the model here, unlike on devices: with a small model
  that work is much of a step, whatever is switched on. `--layers` makes the model larger.
- `colocate_async`, an arm for `--arms` alone, is verl's asynchronous trainer on the same devices: a step takes the
  prompts that have finished, requests go on over updates, and samples are of older policies. Its steps are not the same
  mathematics, so that seconds until a reward are compared: nine tenths of the way from stock's first steps to its last.
  The reward is that of the samples which a step trains, so that this arm's curve is as late as its samples are old; its
  first measured step finds a batch that is generated already.
- Prompts come back every `--epoch` steps, like in training on verifiable rewards: drafts from history depend on that.

Ratios are of sums of seconds over the steps of all rounds (stock over verl-fuse; in the ablation: without the feature
over with all). Intervals are bootstraps over steps, steps of the same number in the same round together: 95 %, for the
reward's difference in the last `--last` steps 90 %.

    python -m ci.bench.step [--case grpo] [--arms stock all] [--rounds 1] [--steps 11] [--epoch 3] [--layers 8]
        [--quick] [--keep DIRECTORY] [--picture FILE.svg]

`--quick` is two rounds of stock and all, of one case. With `--keep`, runs that are there already are not repeated.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ci.bench.support.picture import draw
from ci.bench.support.runs import bootstrap, in_folder, interval, launch, parser, ratio, to_and_fro
from verl_fuse.cli.run import BASELINE
from verl_fuse_cpu.task.make import make
from verl_fuse_cpu.task.parameters import Parameters, WarmStart

STOCK, TRAINER, ALL, WITHOUT = "stock", "trainer", "all", "no-"
ASYNCHRONOUS = "colocate_async"
# The overrides of the arms that are verl's own trainers.
TRAINERS = {STOCK: BASELINE, ASYNCHRONOUS: ("trainer.v1.trainer_mode=colocate_async", "~fuse")}
# Stock verl is fastest on such lengths without padding, and with micro-batches of so many tokens.
TOKENS = 1024
PACKED = (
    "actor_rollout_ref.model.use_remove_padding=true",
    "critic.model.use_remove_padding=true",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={TOKENS}",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={TOKENS}",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
    f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={TOKENS}",
    "critic.use_dynamic_bsz=true",
    # verl 0.9.1 reads this key alone for the critic, and packs 32,768 tokens without it: a mask over all of them, which
    # attention on a CPU needs, then makes the critic's update up to twice as long as the actor's.
    f"++critic.ppo_infer_max_token_len_per_gpu={TOKENS}",
)
# Either switch of the update needs metrics of the computed samples alone.
COMPUTED = "fuse.update.metrics=computed"
# The task has long traces, and a model that has learned to write them: responses of 50 tokens on average and 240 at
# most. With an exponent of 1.0 responses have 20 tokens, and a rollout is mostly the way of its requests through Ray.
TASK = Parameters(tail_exponent=0.5, warm_start=WarmStart(exponent=0.5, careless=0.05))
LAYERS = 8
PROMPTS = 16
# With the recipe's rate, policies of two runs drift apart within ten steps, and their lengths by a third.
LITTLE = "actor_rollout_ref.actor.optim.lr=1.0e-6"
QUICK_ROUNDS = 2
# A reward is reached where its mean over so many steps is; the part of stock's way that counts as reached.
WINDOW, WAY = 5, 0.9


@dataclass(frozen=True)
class Case:
    """A case is a recipe with the overrides of all arms, and the features that pay there, in the order of the ladder,
    with the overrides that switch them on."""

    recipe: str
    overrides: tuple[str, ...]
    features: Mapping[str, tuple[str, ...]]

    @property
    def arms(self) -> dict[str, frozenset[str] | tuple[str, ...]]:
        """Return the features of each arm by name, or the overrides of verl's own trainer. A rung of the ladder has the
        name of the feature that it adds, the last rung is `all`."""
        names = list(self.features)
        rungs = {name: frozenset(names[: place + 1]) for place, name in enumerate(names[:-1])}
        whole = frozenset(names)
        left_out = {f"{WITHOUT}{name}": whole - {name} for name in names}
        return {**TRAINERS, TRAINER: frozenset(), **rungs, ALL: whole, **left_out}

    @property
    def ladder(self) -> list[str]:
        return [TRAINER, *list(self.features)[:-1], ALL]

    @property
    def runs(self) -> list[str]:
        """Return the arms that differ: the arm without the last feature is the ladder's last rung but one."""
        return [name for name in self.arms if self.same(name) == name]

    def same(self, arm: str) -> str:
        """Return the first arm with the features of this arm."""
        return next(name for name, features in self.arms.items() if features == self.arms[arm])


CASES = {
    "grpo": Case(
        "grpo-cpu",
        ("actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.rollout.n=8"),
        {
            "skip_zero_gradient": ("fuse.update.skip_zero_gradient=true", COMPUTED),
            "skip_old_log_prob": ("fuse.update.skip_old_log_prob=true", COMPUTED),
            "speculation": ("fuse.speculation.enabled=true",),
        },
    ),
    "common": Case(
        "grpo-cpu",
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.strategy=fsdp",
            "actor_rollout_ref.actor.use_kl_loss=true",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 4}",
            LITTLE,
        ),
        {
            "balance": ("fuse.update.balance=true",),
            "skip_old_log_prob": ("fuse.update.skip_old_log_prob=true", COMPUTED),
            "response_logits": ("fuse.update.response_logits=true",),
        },
    ),
    "ppo": Case(
        "ppo-cpu",
        ("actor_rollout_ref.rollout.n=4", LITTLE),
        {
            "skip_values": ("fuse.update.skip_values=true",),
            "interstage": (
                "fuse.interstage.enabled=true",
                "fuse.interstage.layout=slices",
                "fuse.interstage.migration_threshold=0.25",
            ),
            "speculation": ("fuse.speculation.enabled=true",),
        },
    ),
}


@dataclass(frozen=True)
class Size:
    """The number of measured steps of a run, the number of steps after which prompts come back, and the layers of the
    model."""

    steps: int
    epoch: int
    layers: int = LAYERS


def overrides(case: Case, arm: str, task: Path, folder: Path, size: Size, seed: int) -> list[str]:
    steps, features = size.steps + 1, case.arms[arm]
    common = [
        f"task_dir={task}",
        f"data.train_max_samples={PROMPTS * size.epoch}",
        f"data.train_batch_size={PROMPTS}",
        f"data.seed={seed}",
        "data.val_max_samples=16",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"critic.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.seed={seed}",
        *PACKED,
        *case.overrides,
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
        "trainer.val_before_train=true",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    if isinstance(features, tuple):
        return [*common, *features]
    ours = ["fuse.observe.progress=false", "fuse.observe.perfetto=false", "fuse.observe.html=false"]
    switched = [key for name, keys in case.features.items() if name in features for key in keys]
    return [*common, *ours, *dict.fromkeys(switched)]


def run(folder: Path, case: Case, settings: list[str], **variables: str) -> list[dict[str, Any]]:
    """Return the records of every step of one run but the first, with these environment variables; a run that `folder`
    holds already is not repeated."""
    measurements, asked = folder / "steps.jsonl", folder / "overrides.json"
    if not (folder / "ended").exists():
        # An earlier run broke off.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        asked.write_text(json.dumps(settings))
        told = {"STEP_BENCH": str(measurements), **variables}
        launch(folder, "step_arms", settings, folder / "run.log", recipe=case.recipe, **told)
        if not measurements.exists():
            sys.exit(f"the run measured no step: {folder / 'run.log'}")
        (folder / "ended").touch()
    elif json.loads(asked.read_text()) != settings:
        sys.exit(f"{folder} is of a run with other settings; name another --keep")
    return [json.loads(line) for line in measurements.read_text().splitlines()][1:]


Steps = list[dict[str, Any]]
"""The figures of all rounds, one round after the other."""


def bench(folder: Path, name: str, wanted: Sequence[str], rounds: int, size: Size) -> dict[str, Steps]:
    """Return the measured steps of each arm."""
    case, task = CASES[name], folder / f"task-{size.layers}"
    make(task, replace(TASK, layers=size.layers), say=lambda line: print(line, file=sys.stderr))
    arms = [arm for arm in case.runs if arm in {case.same(one) for one in wanted if one in case.arms}]

    def steps(arm: str, number: int) -> Steps:
        home = folder / f"{name}-{number}-{arm}"
        return run(home, case, overrides(case, arm, task, home, size, number))

    return to_and_fro(arms, rounds, steps)


def of(steps: Steps, what: str) -> list[float]:
    return [step[what] for step in steps]


def compared(over: Steps, under: Steps) -> dict[str, Any]:
    found, bounds = ratio(of(over, "seconds"), of(under, "seconds"))
    return {"ratio": found, "interval": bounds}


def seconds_per_token(steps: Steps) -> float:
    return sum(of(steps, "seconds")) / sum(of(steps, "tokens"))


def reward_difference(stock: Steps, ours: Steps, last: int) -> list[float]:
    """Return the 90 % interval of the mean of verl-fuse's reward less stock's in the last steps of each run."""
    runs = [step["step"] for step in stock]
    pairs = [(a["score"], b["score"]) for a, b in zip(stock, ours, strict=True) if a["step"] > max(runs) - last]
    differences = [b - a for a, b in pairs]
    return interval(bootstrap(differences)[:, 0] / len(differences), 0.9)


def time_to_reward(found: Mapping[str, Steps], last: int) -> dict[str, Any]:
    """Return the reward at nine tenths of stock's way, None where stock's reward does not rise, and by arm: the steps
    and seconds until the mean reward of `WINDOW` steps is there, None where a run ends before; the reward in the first
    `WINDOW` and the `last` steps; the mean number of updates by which the oldest weights that a sample comes from are
    older than the policy which trains on it; and the samples that verl discarded. Rewards and seconds are means over
    rounds."""

    def mean(steps: Steps, what: str) -> np.ndarray:
        numbers = sorted(set(of(steps, "step")))
        return np.array([np.mean([step[what] for step in steps if step["step"] == number]) for number in numbers])

    stock = mean(found[STOCK], "score")
    first, final = stock[:WINDOW].mean(), stock[-last:].mean()
    level = float(first + WAY * (final - first)) if final > first else None

    def reached(steps: Steps) -> dict[str, Any]:
        score, at = mean(steps, "score"), mean(steps, "at")
        begun = at[0] - mean(steps, "seconds")[0]
        means = np.convolve(score, np.full(WINDOW, 1 / WINDOW), mode="valid")
        there = [WINDOW + place for place, value in enumerate(means) if level is not None and value >= level]
        return {
            "steps": there[0] if there else None,
            "seconds": round(float(at[there[0] - 1] - begun), 1) if there else None,
            "first_reward": round(float(score[:WINDOW].mean()), 3),
            "last_reward": round(float(score[-last:].mean()), 3),
            "staleness": round(float(mean(steps, "staleness").mean()), 3),
            "evicted": int(sum(of(steps, "evicted"))),
        }

    arms = {arm: reached(found[arm]) for arm in (STOCK, ALL, ASYNCHRONOUS)}
    return {"reward": None if level is None else round(level, 3), "arms": arms}


def shares(steps: Steps) -> dict[str, float]:
    """Return the share of each part in all seconds, by verl's timers."""
    whole = sum(of(steps, "seconds"))
    spent = {name: sum(step["parts"].get(name, 0.0) for step in steps) for name in steps[0]["parts"]}
    return {name: round(seconds / whole, 3) for name, seconds in spent.items() if seconds >= 0.005 * whole}


def report(name: str, found: dict[str, Steps], last: int) -> dict[str, Any]:
    """Return one case of the benchmark's JSON line."""
    case = CASES[name]
    stock, ours = found[STOCK], found[ALL]
    ladder = {arm: found[case.same(arm)] for arm in case.ladder if case.same(arm) in found}
    left_out = {feature: case.same(WITHOUT + feature) for feature in case.features}
    every = [step for steps in found.values() for step in steps]
    return {
        "case": name,
        **compared(stock, ours),
        "ratio_per_token": round(seconds_per_token(stock) / seconds_per_token(ours), 3),
        "ladder": {arm: compared(stock, steps) for arm, steps in ladder.items()},
        "ablation": {
            feature: compared(found[arm], ours) for feature, arm in left_out.items() if arm in found and arm != ALL
        },
        "steps": len(stock),
        "samples": int(sum(of(every, "samples"))),
        "lost": int(sum(of(every, "lost"))),
        "duplicated": int(sum(of(every, "duplicated"))),
        "reward_difference_interval": reward_difference(stock, ours, last),
        **({"time_to_reward": time_to_reward(found, last)} if ASYNCHRONOUS in found else {}),
        "reward": {arm: round(float(np.mean(of(steps, "score"))), 3) for arm, steps in found.items()},
        "seconds": {arm: round(float(np.mean(of(steps, "seconds"))), 3) for arm, steps in found.items()},
        # Other work of the machine beside a step shows in the mean alone.
        "median_seconds": {arm: round(float(np.median(of(steps, "seconds"))), 3) for arm, steps in found.items()},
        "tokens": {arm: round(float(np.mean(of(steps, "tokens"))), 1) for arm, steps in found.items()},
        "longest": max(of(every, "longest")),
        "entropy": round(float(np.mean(of(stock, "entropy"))), 3),
        "shares": {arm: shares(steps) for arm, steps in (("stock", stock), ("all", ours))},
    }


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here, and go on with those that are there")
    arguments.add_argument("--case", choices=tuple(CASES), action="append", help="may be given again; all")
    every = dict.fromkeys(arm for case in CASES.values() for arm in case.arms)
    arguments.add_argument(
        "--arms",
        nargs="+",
        choices=tuple(every),
        metavar="ARM",
        help=f"of {', '.join(every)}, besides stock and all; default: ladder and ablation",
    )
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=11, help="measured steps of a run")
    arguments.add_argument("--epoch", type=int, default=3, help="steps after which prompts come back")
    arguments.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    arguments.add_argument("--last", type=int, default=20, help="steps whose rewards are compared")
    arguments.add_argument("--quick", action="store_true", help="two rounds of stock and all, of one case")
    arguments.add_argument("--picture", type=Path, help="an SVG file of the ladder")
    given = arguments.parse_args()
    if ASYNCHRONOUS in (given.arms or ()) and given.steps < WINDOW + given.last:
        least = f"{WINDOW + given.last} steps: the first {WINDOW}, and the --last {given.last}"
        arguments.error(f"--steps {given.steps}: the arm {ASYNCHRONOUS} needs at least {least}")
    names = given.case or (["grpo"] if given.quick else list(CASES))
    rounds = QUICK_ROUNDS if given.quick else given.rounds
    size = Size(given.steps, given.epoch, given.layers)

    def work(folder: Path) -> dict[str, Any]:
        cases = []
        for name in names:
            every_arm = [arm for arm in CASES[name].runs if arm != ASYNCHRONOUS]
            wanted = [STOCK, ALL, *(given.arms or ([] if given.quick else every_arm))]
            cases.append(report(name, bench(folder, name, wanted, rounds, size), given.last))
        if given.picture:
            draw(cases, given.picture)
        return {"bench": "step", "rounds": rounds, "epoch_steps": given.epoch, "layers": given.layers, "cases": cases}

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
