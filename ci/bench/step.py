"""Compare whole steps of stock verl with all features of verl-fuse that pay: actor, and critic, trained; FSDP2 on two
ranks, two vLLM replicas.

- grpo: without KL, 8 samples a prompt; ppo: critic, KL in the reward; common: what most public scripts run, GRPO on
  FSDP1 with a KL loss and 4 mini-batches, 8 samples a prompt (`ci.bench.common` compares features on it). The task is
  Euclid's (plugins/verl_fuse_cpu/task), its model trained before, at temperature 1: lengths and rewards come from the
  model. `--task smollm2` trains a published model of 135 M parameters (task/smollm2), 4 prompts a step in place of 16,
  PPO without KL.
- stock is verl's own trainer, which looks at the rollout at verl-fuse's pace. The ladder adds one feature after the
  other to verl-fuse's trainer, the ablation leaves one feature out, and `fast` has what `fuse.preset=fast` chooses.
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
  The default is 3, for `smollm2` 20.

Ratios are of sums of seconds over the steps of all rounds (stock over verl-fuse; in the ablation: without the feature
over with all; `fast` stands in for all where all was not run). Intervals are bootstraps over steps, steps of the same
number in the same round together: 95 %, for the reward's difference in the last `--last` steps 90 %.

`prompt_tokens` and `response_tokens` are median, 90th and 99th percentile of stock's samples, `cut_off` is the share of
its responses as long as the limit, and `tokens_per_step` what it trains on. Acceptance of drafts, the shares of samples
without a gradient and of the prompts' tokens that the update left out because they are shared, and the idle share of
devices are those of the arm with features. `validation`, of `smollm2` alone, has the accuracy on its unseen problems
before and after each run.

    python -m ci.bench.step [--task smollm2] [--case grpo] [--arms stock all] [--rounds 1] [--steps 11] [--epoch 3]
        [--layers 8] [--quick] [--keep DIRECTORY] [--picture FILE.svg]

`--quick` is stock and `fast`, of one case: two rounds, of `smollm2` one of 3 steps (15 minutes). With `--keep`, runs
that are there already are not repeated.
"""

import json
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ci.bench.support.picture import draw
from ci.bench.support.runs import bootstrap, in_folder, interval, launch, packed, parser, ratio, to_and_fro
from verl_fuse.cli.report import read_metrics
from verl_fuse.cli.run import BASELINE
from verl_fuse_cpu.task.make import make
from verl_fuse_cpu.task.parameters import Parameters, WarmStart
from verl_fuse_cpu.task.smollm2 import make as smollm2
from verl_fuse_cpu.task.smollm2.problems import shares as shares_of_kinds

STOCK, TRAINER, ALL, FAST, WITHOUT = "stock", "trainer", "all", "fast", "no-"
ASYNCHRONOUS = "colocate_async"
# The overrides of the arms that are verl's own trainers.
TRAINERS = {STOCK: BASELINE, ASYNCHRONOUS: ("trainer.v1.trainer_mode=colocate_async", "~fuse")}
SMOLLM2 = "smollm2"
# Either switch of the update needs metrics of the computed samples alone.
COMPUTED = "fuse.update.metrics=computed"
# The task has long traces, and a model that has learned to write them: responses of 50 tokens on average and 240 at
# most. With an exponent of 1.0 responses have 20 tokens, and a rollout is mostly the way of its requests through Ray.
TASK = Parameters(tail_exponent=0.5, warm_start=WarmStart(exponent=0.5, careless=0.05))
LAYERS, STEPS = 8, 11
# With the recipe's rate, policies of two runs drift apart within ten steps, and their lengths by a third.
LITTLE = "actor_rollout_ref.actor.optim.lr=1.0e-6"
PRESET = {"preset": ("fuse.preset=fast",)}
# A reward is reached where its mean over so many steps is; the part of stock's way that counts as reached.
WINDOW, WAY = 5, 0.9


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Task:
    """A task has a recipe of each algorithm, prompts of a step, tokens of a micro-batch, with which stock verl is
    fastest, steps after which prompts come back, the rounds and steps of `--quick`, what makes it in a folder with a
    model of so many layers, and the unseen problems of each kind, which a run is judged by."""

    recipe: str
    prompts: int
    tokens: int
    epoch: int
    quick: tuple[int, int | None]
    make: Callable[[Path, int], bool]
    unseen: Mapping[str, int] = field(default_factory=dict)


TASKS = {
    "euclid": Task(
        "{}-cpu", 16, 1024, 3, (2, None), lambda out, layers: make(out, replace(TASK, layers=layers), say=_say)
    ),
    SMOLLM2: Task(
        "{}-smollm2-cpu",
        4,
        832,
        20,
        (1, 3),
        lambda out, layers: smollm2.make(out, smollm2.DEFAULTS, say=_say),
        shares_of_kinds(smollm2.DEFAULTS.validation),
    ),
}
EUCLID = TASKS["euclid"]


@dataclass(frozen=True)
class Case:
    """A case is an algorithm with the overrides of all arms, and the features that pay there, in the order of the
    ladder, with the overrides that switch them on."""

    algorithm: str
    overrides: tuple[str, ...]
    features: Mapping[str, tuple[str, ...]]
    mini_batches: int = 1

    @property
    def arms(self) -> dict[str, frozenset[str] | tuple[str, ...]]:
        """Return the features of each arm by name, or the overrides of verl's own trainer. A rung of the ladder has the
        name of the feature that it adds, the last rung is `all`."""
        names = list(self.features)
        rungs = {name: frozenset(names[: place + 1]) for place, name in enumerate(names[:-1])}
        whole = frozenset(names)
        left_out = {f"{WITHOUT}{name}": whole - {name} for name in names}
        return {**TRAINERS, TRAINER: frozenset(), **rungs, ALL: whole, **left_out, FAST: frozenset(PRESET)}

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
        "grpo",
        ("actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.rollout.n=8"),
        {
            "skip_zero_gradient": ("fuse.update.skip_zero_gradient=true", COMPUTED),
            "skip_old_log_prob": ("fuse.update.skip_old_log_prob=true", COMPUTED),
            "speculation": ("fuse.speculation.enabled=true",),
        },
    ),
    "common": Case(
        "grpo",
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.strategy=fsdp",
            "actor_rollout_ref.actor.use_kl_loss=true",
            LITTLE,
        ),
        {
            "balance": ("fuse.update.balance=true",),
            "skip_old_log_prob": ("fuse.update.skip_old_log_prob=true", COMPUTED),
            "response_logits": ("fuse.update.response_logits=true",),
        },
        mini_batches=4,
    ),
    "ppo": Case(
        "ppo",
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
    """The number of measured steps of a run, the number of steps after which prompts come back, the layers of the
    model, and the task."""

    steps: int
    epoch: int
    layers: int = LAYERS
    task: Task = EUCLID


def overrides(case: Case, arm: str, task: Path, folder: Path, size: Size, seed: int) -> list[str]:
    steps, features, prompts = size.steps + 1, case.arms[arm], size.task.prompts
    common = [
        f"task_dir={task}",
        f"data.train_max_samples={prompts * size.epoch}",
        f"data.train_batch_size={prompts}",
        f"data.seed={seed}",
        f"data.val_max_samples={-1 if size.task.unseen else 16}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // case.mini_batches}",
        f"critic.ppo_mini_batch_size={prompts // case.mini_batches}",
        f"actor_rollout_ref.rollout.seed={seed}",
        *packed(size.task.tokens),
        *case.overrides,
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
        "trainer.val_before_train=true",
        f"trainer.test_freq={steps if size.task.unseen else -1}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    if isinstance(features, tuple):
        return [*common, *features]
    ours = ["fuse.observe.progress=false", "fuse.observe.perfetto=false", "fuse.observe.html=false"]
    switched = [key for name, keys in {**case.features, **PRESET}.items() if name in features for key in keys]
    return [*common, *ours, *dict.fromkeys(switched)]


def run(folder: Path, size: Size, case: Case, settings: list[str], **variables: str) -> list[dict[str, Any]]:
    """Return the records of every step of one run but the first, with these environment variables; a run that `folder`
    holds already is not repeated. The last step's record has what `accuracies` says of the run."""
    measurements, asked = folder / "steps.jsonl", folder / "overrides.json"
    if not (folder / "ended").exists():
        # An earlier run broke off.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        asked.write_text(json.dumps(settings))
        told = {"STEP_BENCH": str(measurements), **variables}
        launch(folder, "step_arms", settings, folder / "run.log", size.task.recipe.format(case.algorithm), **told)
        if not measurements.exists():
            sys.exit(f"the run measured no step: {folder / 'run.log'}")
        (folder / "ended").touch()
    elif json.loads(asked.read_text()) != settings:
        sys.exit(f"{folder} is of a run with other settings; name another --keep")
    records = [json.loads(line) for line in measurements.read_text().splitlines()][1:]
    if records and "response_lengths" not in records[0]:
        sys.exit(f"{folder} was measured by an earlier version of this bench; name another --keep")
    if size.task.unseen:
        records[-1]["accuracies"] = accuracies(dict(read_metrics(folder / "metrics.jsonl")), size.task.unseen)
    return records


def accuracies(metrics: Mapping[int, Mapping[str, float]], unseen: Mapping[str, int]) -> list[float]:
    """Return the accuracy on the unseen problems, so many of each kind, before the first step and after the last."""
    return [
        round(sum(many * metrics[step][f"val-core/{kind}/acc/mean@1"] for kind, many in unseen.items()) / total, 4)
        for total in [sum(unseen.values())]
        for step in (min(metrics), max(metrics))
    ]


Steps = list[dict[str, Any]]
"""The figures of all rounds, one round after the other."""


def task_in(folder: Path, size: Size) -> Path:
    """Make the task in the folder, unless it is there, and return its folder."""
    task = folder / (f"task-{size.layers}" if size.task is EUCLID else "task")
    size.task.make(task, size.layers)
    return task


def bench(folder: Path, name: str, wanted: Sequence[str], rounds: int, size: Size) -> dict[str, Steps]:
    """Return the measured steps of each arm."""
    case, task = CASES[name], task_in(folder, size)
    arms = [arm for arm in case.runs if arm in {case.same(one) for one in wanted if one in case.arms}]

    def steps(arm: str, number: int) -> Steps:
        home = folder / f"{name}-{number}-{arm}"
        return run(home, size, case, overrides(case, arm, task, home, size, number))

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

    arms = {arm: reached(found[arm]) for arm in (STOCK, ALL, FAST, ASYNCHRONOUS) if arm in found}
    return {"reward": None if level is None else round(level, 3), "arms": arms}


def shares(steps: Steps) -> dict[str, float]:
    """Return the share of each part in all seconds, by verl's timers."""
    whole = sum(of(steps, "seconds"))
    spent = {name: sum(step["parts"].get(name, 0.0) for step in steps) for name in steps[0]["parts"]}
    return {name: round(seconds / whole, 3) for name, seconds in spent.items() if seconds >= 0.005 * whole}


def percentiles(lengths: Sequence[int]) -> list[int]:
    """Return median, 90th and 99th percentile."""
    return [int(value) for value in np.percentile(lengths, (50, 90, 99), method="nearest")]


def validation(found: Mapping[str, Steps]) -> dict[str, Any]:
    """Return the accuracies of the runs of each arm, if the task has unseen problems."""
    told = {arm: [step["accuracies"] for step in steps if "accuracies" in step] for arm, steps in found.items()}
    return {"validation": told} if any(told.values()) else {}


def described(stock: Steps, ours: Steps) -> dict[str, Any]:
    """Return what the task is, by stock's steps, and what the features found in it, by the metrics of theirs; None
    where a feature was off."""
    lengths = {
        kind: [length for step in stock for length in step[f"{kind}_lengths"]] for kind in ("prompt", "response")
    }

    def mean(metric: str, weight: str | None = None) -> float | None:
        values = [step["own"][metric] for step in ours if metric in step["own"]]
        weights = [step["own"][weight] for step in ours if metric in step["own"]] if weight else [1] * len(values)
        return round(float(np.average(values, weights=weights)), 3) if sum(weights) else None

    return {
        "tokens_per_step": round(sum(map(sum, lengths.values())) / len(stock), 1),
        **{f"{kind}_tokens": percentiles(each) for kind, each in lengths.items()},
        "cut_off": round(sum(of(stock, "cut_off")) / len(lengths["response"]), 3),
        "acceptance": mean("fuse/speculation_acceptance", weight="fuse/speculation_drafted_tokens"),
        "zero_gradient_share": mean("fuse/zero_gradient_samples"),
        "shared_prompt_share": mean("fuse/update_shared_tokens"),
        "idle": mean("fuse/idle_fraction/device"),
    }


def report(name: str, found: dict[str, Steps], last: int) -> dict[str, Any]:
    """Return one case of the benchmark's JSON line."""
    case = CASES[name]
    stock, arm = found[STOCK], ALL if ALL in found else FAST
    ours = found[arm]
    ladder = {arm: found[case.same(arm)] for arm in case.ladder if case.same(arm) in found}
    left_out = {feature: case.same(WITHOUT + feature) for feature in case.features}
    every = [step for steps in found.values() for step in steps]
    return {
        "case": name,
        **compared(stock, ours),
        "ratio_per_token": round(seconds_per_token(stock) / seconds_per_token(ours), 3),
        "ladder": {arm: compared(stock, steps) for arm, steps in ladder.items()},
        "ablation": {
            feature: compared(found[rest], ours)
            for feature, rest in left_out.items()
            if arm == ALL and rest in found and rest != ALL
        },
        **({FAST: compared(stock, found[FAST])} if FAST in found else {}),
        **described(stock, ours),
        **validation(found),
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
        "longest": max(length for step in every for length in step["response_lengths"]),
        "entropy": round(float(np.mean(of(stock, "entropy"))), 3),
        "shares": {arm: shares(steps) for arm, steps in ((STOCK, stock), (arm, ours))},
    }


def add_size(arguments: ArgumentParser) -> None:
    """Add the options that say what is run, for how long."""
    arguments.add_argument("--task", choices=tuple(TASKS), default="euclid")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--steps", type=int, help=f"measured steps of a run; {STEPS}")
    arguments.add_argument("--layers", type=int, help=f"of the model of euclid; {LAYERS}")
    arguments.add_argument("--quick", action="store_true", help="stock and fast alone, some steps")


def add_arms(arguments: ArgumentParser, arms: Iterable[str], which: str) -> None:
    arguments.add_argument(
        "--arms", nargs="+", choices=tuple(arms), metavar="ARM", help=f"of {', '.join(arms)}, {which}"
    )


def size_of(given: Namespace, arguments: ArgumentParser) -> tuple[Size, int]:
    """Return the size and the number of rounds that were asked for."""
    task = TASKS[given.task]
    if given.layers is not None and task is not EUCLID:
        arguments.error(f"--layers {given.layers}: the model of --task {given.task} is as published")
    if given.quick and given.arms:
        arguments.error("--quick has arms of its own: leave --arms out")
    rounds, steps = task.quick if given.quick else (given.rounds, None)
    return Size(given.steps or steps or STEPS, given.epoch or task.epoch, given.layers or LAYERS, task), rounds


def told_of(given: Namespace, size: Size, rounds: int) -> dict[str, Any]:
    """Return what was asked for, for the JSON line."""
    layers = {"layers": size.layers} if size.task is EUCLID else {}
    return {"task": given.task, "rounds": rounds, "epoch_steps": size.epoch, **layers}


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here, and go on with those that are there")
    add_size(arguments)
    arguments.add_argument("--case", choices=tuple(CASES), action="append", help="may be given again; all")
    every = dict.fromkeys(arm for case in CASES.values() for arm in case.arms)
    add_arms(arguments, every, "besides stock, and all unless fast is named; default: ladder, ablation and fast")
    arguments.add_argument("--epoch", type=int, help="steps after which prompts come back; 3, smollm2: 20")
    arguments.add_argument("--last", type=int, default=20, help="steps whose rewards are compared")
    arguments.add_argument("--picture", type=Path, help="an SVG file of the ladder")
    given = arguments.parse_args()
    size, rounds = size_of(given, arguments)
    if ASYNCHRONOUS in (given.arms or ()) and size.steps < WINDOW + given.last:
        least = f"{WINDOW + given.last} steps: the first {WINDOW}, and the --last {given.last}"
        arguments.error(f"--steps {size.steps}: the arm {ASYNCHRONOUS} needs at least {least}")
    names = given.case or (["grpo"] if given.quick else list(CASES))

    def work(folder: Path) -> dict[str, Any]:
        cases = []
        for name in names:
            every_arm = [arm for arm in CASES[name].runs if arm != ASYNCHRONOUS]
            wanted = [STOCK, *([FAST] if given.quick else given.arms or every_arm)]
            # A report compares one of them with stock.
            wanted += [] if {ALL, FAST} & set(wanted) else [ALL]
            cases.append(report(name, bench(folder, name, wanted, rounds, size), given.last))
        if given.picture:
            if ladders := [case for case in cases if case["ladder"]]:
                draw(ladders, given.picture)
            else:
                print(f"{given.picture}: not drawn, no rung of a ladder was run", file=sys.stderr)
        return {"bench": "step", **told_of(given, size, rounds), "cases": cases}

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
