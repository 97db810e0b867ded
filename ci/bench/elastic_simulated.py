"""Simulate 200 steps of elastic generation against static verl and RLHFuse's global migration: lengths drift, prompts
come back, and the policies are `fuse.elastic`'s own.

The cluster has 20 nodes of 8 H100 with Llama 2 70B, or RLHFless's 16 L40S with Qwen2.5-3B; layouts, and everything but
generation, are the stock plan's. Usual lengths of prompts are drawn once; in step t the lengths of responses are the
distribution's lengths times 1 + drift * sin(2 pi t / steps). Only generation differs between the arms; with inference
(`+ inference`) devices that generate no more also run inference (`fuse.interstage.layout=slices`). Cost is devices
times seconds over the whole step, less the device-seconds given back; training takes the same in every step. No arm can
be faster than the floor: the longest response alone on a replica from the start, and all inference hidden.

The policy is also judged by itself, on generation alone (support/regret.py): beside the policy run counts of replicas
that never change, with the same predictions, assignment and release. Its regret is against the best of these counts in
each step.

    python -m ci.bench.elastic_simulated [--setup h100] [--steps 200] [--response TEXT_OR_FILE]
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ci.bench.support.regret import WEIGHTS, Taken, judged
from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import FRAMEWORK
from verl_fuse.simulate.calls import freed_inference
from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.simulate.elastic import ElasticResult as Run
from verl_fuse.simulate.elastic import cut_and_migrate, shared_prefixes
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import replica_count, replica_timing
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.step import simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.simulate.tail import InferenceWork, MigrationCost, least_survivors, migrated, trigger_time
from verl_fuse.simulate.timing import ReplicaTiming
from verl_fuse.spec.arrays import Floats
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.prompts import Prompt
from verl_fuse.spec.timeline import GENERATION, OLD_LOG_PROB, REF_LOG_PROB
from verl_fuse.spec.workload import Workload
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_elastic.assignment import TOKENS_ALONE, Line, assign
from verl_fuse_elastic.corrections import Corrections
from verl_fuse_elastic.prediction import LengthPredictor, afterwards
from verl_fuse_elastic.scaling import Terms, choose, forecast, forecasts

GAINS = json.loads((Path(__file__).parents[2] / "tests/golden/fusion_gains.json").read_text())["rlhfless"]
# The number of prompts of GSM8K, and the correlation of a response's length with its prompt's usual length
# (verl_fuse/simulate/options.py).
DATA_SET, PREDICTABILITY = 7473, 0.8
TAIL, LATENCY, POLL = 0.2, 0.1, 0.0
FIXED = 12
INFERENCE = (REF_LOG_PROB, OLD_LOG_PROB)


@dataclass(frozen=True)
class Arm:
    """The keys `cost_weight` and `cut_fraction` of `fuse.elastic`, and whether devices that generate no more run
    inference. An arm with a `count` never changes its number of replicas."""

    weight: float
    cut: float
    inference: bool
    count: int | None = None

    def __str__(self) -> str:
        if self.count is not None:
            return f"fixed {self.count}"
        return f"elastic {self.weight} {self.cut}" + " + inference" * self.inference


ARMS = (
    *(Arm(weight, 1.0, False) for weight in (0.0, 0.2, 0.5, 0.8)),
    Arm(0.5, 0.8, False),
    *(Arm(weight, 1.0, True) for weight in (0.0, 0.2, 0.5)),
)


@dataclass(frozen=True)
class Spent:
    """The cost of one step, or of each: seconds from its begin until all samples are generated and inferred, and
    replica-seconds held for that."""

    seconds: Any
    held: Any


@dataclass(frozen=True)
class Setup:
    """A cluster and a workload; `inference` is the work of inference on freed replicas, `rest` are seconds of a step
    beside generation and inference."""

    workload: Workload
    timing: ReplicaTiming
    replicas: int
    rest: float
    inference: InferenceWork

    def then_inferred(self, lengths: DrawnLengths, seconds: float, held: float) -> Spent:
        """Return the cost with inference on all replicas once generation is over."""
        work = float(self.inference.work(Requests.of(lengths.prompt, lengths.response)).sum())
        return Spent(seconds + work / self.replicas, held + work)

    def meanwhile_inferred(self, run: Run) -> Spent:
        """Return the cost with inference on the replicas that are given up, which are paid for while they load or
        compute; then on all replicas."""
        end, early = infer_on_freed(run, self.replicas, self.inference)
        return Spent(end, float(run.ends.sum()) + early + self.replicas * (end - run.seconds))


def infer_on_freed(run: Run, replicas: int, inference: InferenceWork) -> tuple[float, float]:
    """Run inference on the devices of replicas that are done, and of the `replicas` that never ran, while others still
    generate; then on all devices.

    When it ends, and replica-seconds in which devices loaded models or computed before generation ended. For devices
    that replicas do not share (`InferenceWork.dedicated`), without headroom.
    """
    end = run.seconds
    given_up = np.concatenate([run.ends, np.zeros(replicas - len(run.ends))])
    releases = given_up + inference.load_seconds
    order = np.argsort(run.rollout.finish)
    finish, work = run.rollout.finish[order], inference.work(run.rollout.requests)[order]

    def done(times: Floats) -> Floats:
        """Work that could be done until then."""
        return np.maximum(0.0, times[:, None] - releases).sum(axis=1) / inference.slice_factor

    # Work that is ready at some time was not begun before: the most demanding of these times decides.
    left = np.cumsum(work[::-1])[::-1]
    latest = float((done(finish) + left).max())
    late = max(0.0, latest - float(done(np.array([end]))[0]))
    inferred = end + late / replicas
    last = inference.last_seconds if work.any() else 0.0
    loading = float(np.clip(end - given_up, 0.0, inference.load_seconds).sum())
    return max(inferred, end + last), loading + float(work.sum() - late) * inference.slice_factor


def make_setup(name: str, response: str | None) -> Setup:
    data, assumed = dict(GAINS["setup"][name]), GAINS["assumed"]
    cost = AnalyticCost(cluster_named(data.pop("device"), nodes=data.pop("nodes")), FRAMEWORK)
    lengths = {"prompt": assumed["prompt"], "response": response or assumed["response"]}
    workload = Workload.from_dict({"algorithm": "grpo", **data, "reference": data["actor"], **lengths})
    # Room for all samples of a replica, as in the published set-up: verl's default of 256 would make some wait.
    options = SimulationOptions(stock_poll=POLL, fuse_poll=POLL, max_num_seqs=1024)
    plan = stock_plan(workload, cost, options)
    call = plan.call("actor_generate")
    step = simulate_step(workload, plan, cost, "stock", np.random.default_rng(0), options)
    rest = step.seconds - sum(step.stages[name] for name in (GENERATION, *INFERENCE))
    calls = tuple(c for c in workload.calls if c.kind == "infer")
    inference = freed_inference(workload, calls, plan, cost, options, options.micro_group)
    timing = replica_timing(workload, call, cost, options)
    return Setup(workload, timing, replica_count(call.layout), rest, inference)


class DataSet:
    """A data set of prompts with a usual length each, visited epoch after epoch in random order."""

    def __init__(self, workload: Workload, seed: int):
        self._workload, self._rng = workload, np.random.default_rng(seed)
        self._usual = self._rng.standard_normal(DATA_SET)
        self._prompt = workload.prompt.sample(self._rng, DATA_SET)
        self._order = np.empty(0, np.int64)

    def batch(self, scale: float) -> tuple[np.ndarray, DrawnLengths]:
        """Return the numbers of the step's prompts, and the lengths of their samples; nothing is predicted."""
        count, n = self._workload.prompts, self._workload.samples
        while len(self._order) < count:
            self._order = np.concatenate([self._order, self._rng.permutation(DATA_SET)])
        chosen, self._order = self._order[:count], self._order[count:]
        own = self._rng.standard_normal((count, n))
        score = PREDICTABILITY * self._usual[chosen][:, None] + np.sqrt(1 - PREDICTABILITY**2) * own
        response = np.clip(_quantiles(self._workload, score.ravel()) * scale, 1, self._workload.response.maximum)
        group = np.repeat(np.arange(count), n)
        return chosen, DrawnLengths(group, self._prompt[chosen][group], response.astype(np.int64), np.ones_like(group))


def _quantiles(workload: Workload, score: np.ndarray) -> np.ndarray:
    lengths, normal = workload.response, NormalDist()
    cumulative = np.cumsum(lengths.probabilities)[:-1]
    return np.asarray(lengths.values)[np.searchsorted(cumulative, [normal.cdf(z) for z in score], side="right")]


def static(setup: Setup, lengths: DrawnLengths) -> Spent:
    """Return the cost of samples dealt out one by one, with all replicas held to the end."""
    through = _begin(setup, lengths, round_robin(len(lengths.group), setup.replicas)).advance()
    return setup.then_inferred(lengths, through.seconds, setup.replicas * through.seconds)


def floor(setup: Setup, lengths: DrawnLengths) -> Spent:
    """Return the cost of the longest response alone on a replica."""
    longest = int(lengths.response.argmax())
    alone = Requests.of(lengths.prompt[[longest]], lengths.response[[longest]])
    seconds = RolloutState.begin(alone, setup.timing, [np.zeros(1, np.int64)]).advance().seconds
    return Spent(seconds, seconds)


def global_migration(setup: Setup, lengths: DrawnLengths, inference: bool) -> Spent:
    """Return the cost of RLHFuse's migration: the last fifth moves to the fewest replicas with room; the others are
    given back, or run inference."""
    begun = _begin(setup, lengths, round_robin(len(lengths.group), setup.replicas))
    trigger = trigger_time(begun.advance(), int(TAIL * len(lengths.group)))
    paused = begun.advance(trigger)
    survivors = least_survivors(paused)
    if survivors >= setup.replicas:
        return static(setup, lengths)
    found = migrated(paused, trigger, survivors, InferenceWork(0.0), MigrationCost(LATENCY))
    ends = np.full(setup.replicas, found.release)
    ends[found.survivors] = found.generation_end
    run = Run(found.rollout, ends, found.moved)
    if inference:
        return setup.meanwhile_inferred(run)
    return setup.then_inferred(lengths, run.seconds, float(ends.sum()))


class Elastic:
    """The policies of `fuse.elastic` with scale and release: they predict, scale and assign the same way as at run
    time; a replica that has done `cut` of its requests moves the rest to the others."""

    def __init__(self, setup: Setup, arm: Arm):
        self._setup, self._arm, self._predictor = setup, arm, LengthPredictor()
        self._terms = Terms(arm.weight, 1, setup.replicas, 0.0, 0.05)
        self._running, self._decode = setup.replicas, TOKENS_ALONE
        self._corrections = Corrections()
        self.decisions: list[float] = []
        self.counts: list[int] = []
        self.generated: list[Taken] = []

    def step(self, chosen: np.ndarray, lengths: DrawnLengths) -> Spent:
        setup, n = self._setup, self._setup.workload.samples
        prompts = [Prompt(str(i), str(number), "gsm8k", n) for i, number in enumerate(chosen.tolist())]
        begun = time.process_time()
        predictions = self._predictor.predict(prompts)
        count, line, before = self._arm.count or setup.replicas, None, self._running
        if predictions is not None:
            prompts = [replace(p, prediction=found) for p, found in zip(prompts, predictions, strict=True)]
        if predictions is not None and self._arm.count is None:
            line = partial(Line, prompts, setup.timing.max_batch, self._decode, setup.workload.response.maximum)
            found = forecasts(
                line(each=self._corrections.unforetold.seconds), self._terms, self._running, released=True
            )
            hoped = [self._corrections.outcomes.hoped(one) for one in found]
            count = choose(hoped, self._terms, self._running).count
        homes = assign(prompts, range(count), setup.timing.max_batch, self._decode, setup.workload.response.maximum)
        self.decisions.append(time.process_time() - begun)
        self.counts.append(count)
        self._running = count
        home = np.array([homes[str(i)] for i in range(len(prompts))])[lengths.group]
        queues = [np.flatnonzero(home == rank) for rank in range(count)]
        run = cut_and_migrate(_begin(setup, lengths, queues), self._arm.cut, LATENCY)
        responses = lengths.response.reshape(-1, n).tolist()
        self._predictor.observe(zip(prompts, responses, strict=True))
        self._decode = _decode_cost(setup.timing, lengths, count)
        taken = Taken(run.seconds, float(run.ends.sum()))
        if line is not None:
            uids = {prompt.uid: prompt for prompt in prompts}
            made = {p.uid: p.prediction for p in afterwards(uids, dict(zip(uids, responses, strict=True)))}
            known = partial(forecast, count=count, terms=self._terms, running=before, released=True, generated=made)
            self._corrections.learn(lambda each: known(line(each=each)), len(home), taken.seconds, taken.held)
        self.generated.append(taken)
        if self._arm.inference:
            return setup.meanwhile_inferred(run)
        return setup.then_inferred(lengths, run.seconds, float(run.ends.sum()))


def _decode_cost(timing: ReplicaTiming, lengths: DrawnLengths, replicas: int) -> DecodeCost:
    """Return the result of a fit over the step's requests: the line through a small and a full batch at the mean
    context."""
    context = float((lengths.prompt + lengths.response / 2).mean())
    full = max(2, min(timing.max_batch, len(lengths.group) // replicas))
    one, many = timing.step_seconds(1, context), timing.step_seconds(full, context)
    sequence = max(0.0, (many - one) / (full - 1))
    return DecodeCost(one - sequence, sequence)


def _begin(setup: Setup, lengths: DrawnLengths, queues: list[np.ndarray]) -> RolloutState:
    cached = shared_prefixes(lengths.prompt, lengths.group, queues)
    return RolloutState.begin(Requests.of(lengths.prompt, lengths.response, cached), setup.timing, queues)


def run(setup: Setup, steps: int, drift: float, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run all arms on the same lengths: return a row of each arm, and the policy's worth beside fixed counts."""
    data = DataSet(setup.workload, seed)
    fixed = {str(arm): Elastic(setup, arm) for arm in fixed_counts(setup.replicas)}
    elastic = {str(arm): Elastic(setup, arm) for arm in ARMS}
    others = {
        "static": static,
        "global": partial(global_migration, inference=False),
        "global + inference": partial(global_migration, inference=True),
        "floor": floor,
    }
    spent: dict[str, list[Spent]] = {name: [] for name in (*others, *elastic)}
    for step in range(steps):
        chosen, lengths = data.batch(1 + drift * float(np.sin(2 * np.pi * step / steps)))
        for name, take in others.items():
            spent[name].append(take(setup, lengths))
        for name, policy in elastic.items():
            spent[name].append(policy.step(chosen, lengths))
        for policy in fixed.values():
            policy.step(chosen, lengths)
    rows = {name: _row(setup, found, spent["static"], elastic.get(name)) for name, found in spent.items()}
    judge = judged(
        {weight: elastic[str(Arm(weight, 1.0, False))].generated for weight in WEIGHTS},
        {name: policy.generated for name, policy in fixed.items()},
        f"fixed {setup.replicas}",
    )
    # The cost of one replica while the others do nothing tells nothing about any arm.
    return {**rows, "floor": {key: rows["floor"][key] for key in ("speed", "best_speed")}}, judge


def fixed_counts(replicas: int) -> list[Arm]:
    """Return every count, or with many replicas FIXED counts at equal ratios."""
    spread = (
        {round(replicas ** (n / (FIXED - 1))) for n in range(FIXED)} if replicas > FIXED else range(1, replicas + 1)
    )
    return [Arm(0.0, 1.0, False, count) for count in sorted(spread)]


def _row(setup: Setup, found: list[Spent], stock: list[Spent], policy: Elastic | None) -> Mapping[str, Any]:
    whole, whole_stock = (
        Spent(
            np.array([s.seconds for s in spent]) + setup.rest,
            np.array([s.held for s in spent]) + setup.replicas * setup.rest,
        )
        for spent in (found, stock)
    )
    row = {
        "speed": round(float(whole_stock.seconds.sum() / whole.seconds.sum()), 3),
        "best_speed": round(float((whole_stock.seconds / whole.seconds).max()), 3),
        "cost": round(float(whole.held.sum() / whole_stock.held.sum() - 1), 3),
        "best_cost": round(float((whole.held / whole_stock.held).min() - 1), 3),
    }
    if policy is None:
        return row
    milliseconds = 1e3 * np.array(policy.decisions)
    return {
        **row,
        "replicas": [int(min(policy.counts)), int(max(policy.counts))],
        "decision_milliseconds": round(float(np.median(milliseconds)), 1),
        "slowest_decision": round(float(milliseconds.max()), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", choices=tuple(GAINS["setup"]), default="h100")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--drift", type=float, default=0.5)
    parser.add_argument("--response", help="a distribution of lengths, or FILE#COLUMN")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    setup = make_setup(args.setup, args.response)
    rows, judge = run(setup, args.steps, args.drift, args.seed)
    for name, row in rows.items():
        print(f"{name:28}", "  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    for name, row in (*judge["fixed"].items(), *judge["policy"].items()):
        print(f"{name:28}", "  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    figures = {"setup": args.setup, "steps": args.steps, "replicas": setup.replicas, "arms": rows}
    print(json.dumps({"bench": "elastic_simulated", **figures, "rest_seconds": round(setup.rest, 2), **judge}))


if __name__ == "__main__":
    main()
