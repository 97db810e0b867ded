"""Predict published training steps, and compare with their seconds.

    python -m ci.bench.published [--rows FILE]

A row of the file (a JSON list; default: tests/golden/published_steps.json):

    {"id": "nemo1560-8b", "model": "llama-3.1-8b", "device": "h100", "devices": 16, "prompts": 64, "samples": 32,
     "mean_prompt": 150, "mean_response": 930, "limit": 4096, "sigma": 0.6, "minibatches": 4, "reference": true,
     "engine": "megatron", "rollout": "tp1 dp16", "train": "pp2 dp8", "seconds": {"step": 97.7}}

`engine` is megatron or fsdp; a layout of fsdp that names no dp has as many data-parallel ranks as fill the devices.
Lengths of responses are lognormal with `sigma`, cut at `limit`, of `mean_response` on average; prompts have one length.
`seconds` has stages by verl's names, or sums of stages ("old_log_prob+ref"), and may be absent. `source` may be given:
rows of one source are siblings; without it the source is the id up to its first "-". A row without `mean_response` has
one mean for all of its stages, the one at which their errors cancel out; its stages count, its step does not.

A faulty row ends the run with exit code 2, naming row and key.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import FRAMEWORK, EngineFloors
from verl_fuse.cost.model import Batch
from verl_fuse.errors import FuseError
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.replicas import mean_batch, replica_timing
from verl_fuse.simulate.step import simulate_step
from verl_fuse.spec.block import bounded, read_block
from verl_fuse.spec.cluster import Cluster, Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model_names import model_named
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.timeline import GENERATION, OLD_LOG_PROB, REF_LOG_PROB, UPDATE_ACTOR, UPDATE_WEIGHTS
from verl_fuse.spec.workload import Workload

PUBLISHED_ROWS = Path(__file__).parents[2] / "tests" / "golden" / "published_steps.json"
WHOLE_STEP = "step"
STAGES = (GENERATION, OLD_LOG_PROB, REF_LOG_PROB, UPDATE_ACTOR, UPDATE_WEIGHTS)
SEEDS = 4
# Tokens of a micro-batch per device, or a whole sequence where that is longer: verl's ppo_max_token_len_per_gpu where
# nothing is trained, and half of it where activations are kept for the backward.
TOKENS = {"infer": 16384, "train": 8192}
# Shares of a device's memory for the rollout (verl's examples have 0.6): the first in which a replica holds its longest
# sequence.
ROLLOUT_SHARES = (0.6, 0.7, 0.8, 0.9)
# The constants that the rows decide, within the intervals of their sources (verl_fuse/cost/calibration.py). No other
# constant was chosen by a row.
FITTED = {
    "decode_step": (2e-3, 3.5e-3, 5e-3, 7e-3),
    "sequence": (2e-5, 3.5e-5, 5e-5, 7e-5),
    "token": (2.5e-7, 5e-7, 1e-6),
    "sync": (2.0, 3.0, 4.5),
}
# Of the logarithm of a mean length, and of a row's errors.
INFERRED_WITHIN = 0.01
Seconds = Mapping[str, float]


@dataclass(frozen=True)
class PublishedRow:
    """One published step; see the module's docstring."""

    id: str
    model: str
    device: str
    devices: int = field(metadata=bounded(1))
    prompts: int = field(metadata=bounded(1))
    samples: int = field(metadata=bounded(1))
    mean_prompt: float = field(metadata=bounded(1))
    limit: int = field(metadata=bounded(1))
    sigma: float = field(metadata=bounded(0.01, 5))
    minibatches: int = field(metadata=bounded(1))
    reference: bool
    engine: Literal["megatron", "fsdp"]
    rollout: str
    train: str
    mean_response: float | None = field(default=None, metadata=bounded(1))
    seconds: dict[str, float] = field(default_factory=dict, hash=False)
    source: str = ""

    @property
    def group(self) -> str:
        return self.source or self.id.split("-")[0]

    @property
    def cluster(self) -> Cluster:
        node = cluster_named(self.device)
        per_node = min(self.devices, node.devices_per_node)
        if self.devices % per_node:
            raise FuseError(f"devices={self.devices}: needs whole nodes of {per_node}")
        return replace(node, nodes=self.devices // per_node, devices_per_node=per_node)

    def layout(self, key: Literal["rollout", "train"]) -> Layout:
        """Return a layout that fills the devices and divides the model."""
        text: str = getattr(self, key)
        sharded = key == "train" and self.engine == "fsdp"
        if sharded and "dp" not in (part.rstrip("0123456789") for part in text.split()):
            others = [int(part[2:]) for part in text.split() if part[:2] in ("tp", "pp", "cp") and part[2:].isdigit()]
            text = f"dp{max(1, self.devices // math.prod(others))} {text}"
        try:
            layout = Layout.parse(text)
            layout.check(model_named(self.model))
        except FuseError as error:
            raise FuseError(f"{key}={getattr(self, key)!r}: {error}") from error
        if layout.devices != self.devices:
            raise FuseError(f"{key}={text!r}: fills {layout.devices} devices; needs devices={self.devices}")
        if bool(layout.shards) != sharded:
            needs = "a layout with fsdp" if sharded else "no fsdp"
            raise FuseError(f"{key}={text!r}: engine={self.engine!r} needs {needs}")
        return layout

    def workload(self, mean_response: float) -> Workload:
        actor = model_named(self.model)
        return Workload(
            algorithm="grpo",
            prompts=self.prompts,
            samples=self.samples,
            prompt=LengthDistribution.parse(f"fixed:{round(self.mean_prompt)}"),
            response=cut_lognormal(mean_response, self.sigma, self.limit),
            actor=actor,
            reference=actor if self.reference else None,
            minibatches=self.minibatches,
        )


def read_rows(path: Path) -> list[PublishedRow]:
    """Read rows; a FuseError names the row and the key."""
    try:
        data = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise FuseError(f"rows {path}: {error}") from error
    if not isinstance(data, list) or not data:
        raise FuseError(f"rows {path}: needs a list of rows")
    return [_read(entry, number) for number, entry in enumerate(data)]


def _read(entry: Any, number: int) -> PublishedRow:
    name = entry.get("id", number) if isinstance(entry, Mapping) else number
    try:
        row = read_block(PublishedRow, entry, "row")
        cluster, _ = row.cluster, model_named(row.model)
        for key in ("rollout", "train"):
            row.layout(key)
        for key, seconds in row.seconds.items():
            if key != WHOLE_STEP and not set(str(key).split("+")) <= set(STAGES):
                raise FuseError(f"seconds.{key}: unknown stage; allowed: {', '.join((*STAGES, WHOLE_STEP))}, or sums")
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise FuseError(f"seconds.{key}={seconds!r}: needs a number > 0")
        if row.mean_response is None and not row.seconds:
            raise FuseError("missing mean_response, which only seconds could stand in for")
        if not row.reference and any(REF_LOG_PROB in key.split("+") for key in row.seconds):
            raise FuseError(f"reference=false: there is no stage {REF_LOG_PROB}")
        if row.mean_response is not None:
            step_options(row, row.workload(row.mean_response), AnalyticCost(cluster))
        return row
    except FuseError as error:
        raise FuseError(f"row {name!r}: {error}") from error


@lru_cache(maxsize=256)
def cut_lognormal(mean: float, sigma: float, limit: int) -> LengthDistribution:
    """Return the lognormal lengths, cut at `limit`, whose mean is `mean`."""
    if not mean < limit:
        raise FuseError(f"mean_response={mean:g}: needs less than limit={limit}")

    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    def cut_mean(median: float) -> float:
        z = math.log(limit / median) / sigma
        return median * math.exp(sigma**2 / 2) * below(z - sigma) + limit * below(-z)

    low, high = mean / 1e3, 1e3 * limit
    if cut_mean(high) < mean:
        raise FuseError(f"mean_response={mean:g}: no lognormal of sigma={sigma:g} cut at limit={limit} has this mean")
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return LengthDistribution.parse(f"lognormal:median={low:.6g},sigma={sigma:g},max={limit}")


def step_options(row: PublishedRow, workload: Workload, cost: AnalyticCost) -> SimulationOptions:
    """Return the options of a framework that waits for the rollout instead of looking from time to time, with a
    rollout's share of memory in which its longest sequence fits."""
    call = CallPlan("actor_generate", Mesh(0, row.devices), row.layout("rollout"))
    for share in ROLLOUT_SHARES:
        options = SimulationOptions(stock_poll=0.0, rollout_memory=share)
        try:
            replica_timing(workload, call, cost, options)
            return options
        except FuseError as error:
            refusal = error
    raise FuseError(f"rollout={row.rollout!r}: {refusal}")


def step_plan(row: PublishedRow, workload: Workload, cost: AnalyticCost) -> tuple[Plan, bool]:
    """Return the plan of a step, and whether training recomputes activations. FSDP does, by verl's default, Megatron
    where it must; its micro-batches are of `TOKENS`, or halved until they fit, but never below the longest sequence."""
    mesh, train = Mesh(0, row.devices), row.layout("train")
    folded = train.ep > 1 and not train.etp
    longest = workload.prompt.maximum + workload.response.maximum
    halvings = max(0, math.ceil(math.log2(TOKENS["train"] * train.cp / longest)))
    # Recipes leave experts uncut (expert_tensor_parallel_size=1) where they fit.
    layouts = (replace(train, etp=1), train) if folded else (train,)
    for train, recompute in itertools.product(layouts, (True,) if row.engine == "fsdp" else (False, True)):
        for power in range(halvings + 1):
            number = microbatches(workload, "train", train, max(longest, TOKENS["train"] * train.cp / 2**power))
            part = mean_batch(workload).split(train.dp * workload.minibatches * number)
            part = Batch(part.sequences, max(part.tokens, longest), part.squares)
            needed = cost.memory(
                workload.actor, "train", train, microbatch=part, microbatches=number, recompute=recompute
            )
            if needed.total <= cost.cluster.device.memory:
                return _placed(row, workload, mesh, train, number), recompute
    # Users offload where nothing fits.
    return _placed(row, workload, mesh, train, number), recompute


def _placed(row: PublishedRow, workload: Workload, mesh: Mesh, train: Layout, number: int) -> Plan:
    longest = workload.prompt.maximum + workload.response.maximum
    numbers = {
        "train": number,
        "infer": microbatches(workload, "infer", train, max(longest, TOKENS["infer"] * train.cp)),
    }
    return Plan(
        tuple(
            CallPlan(call.name, mesh, row.layout("rollout"))
            if call.kind == "generate"
            else CallPlan(call.name, mesh, train, numbers[call.kind])
            for call in workload.calls
        )
    )


def microbatches(workload: Workload, kind: Literal["infer", "train"], layout: Layout, tokens: float) -> int:
    """Return the micro-batches of so many tokens per data-parallel rank (and mini-batch in training)."""
    updates = workload.minibatches if kind == "train" else 1
    return max(1, math.ceil(mean_batch(workload).tokens / (updates * layout.dp) / tokens))


def predicted(row: PublishedRow, mean_response: float, cost: AnalyticCost, seeds: int) -> dict[str, float]:
    """Return the seconds of the stages and of the step, means over draws of lengths."""
    workload = row.workload(mean_response)
    options = step_options(row, workload, cost)
    plan, recompute = step_plan(row, workload, cost)
    options = replace(options, recompute=recompute)
    steps = [
        simulate_step(workload, plan, cost, "stock", np.random.default_rng(seed), options) for seed in range(seeds)
    ]
    found = {stage: sum(step.stages.get(stage, 0.0) for step in steps) / seeds for stage in STAGES}
    return {**found, WHOLE_STEP: sum(step.seconds for step in steps) / seeds}


def ratios(row: PublishedRow, found: Seconds) -> dict[str, float]:
    """Return real over predicted seconds of every published stage or sum of stages."""
    return {key: real / sum(found[stage] for stage in key.split("+")) for key, real in row.seconds.items()}


def inferred_mean(row: PublishedRow, cost: AnalyticCost, seeds: int) -> float:
    """Return the mean length at which the errors of the row's stages cancel out (their logarithms sum to 0), or its
    step's where it has no stages; at most 0.9 of the limit."""
    keys = set(row.seconds) - {WHOLE_STEP} or {WHOLE_STEP}

    def over(mean: float) -> float:
        found = ratios(row, predicted(row, mean, cost, seeds))
        return sum(math.log(found[key]) for key in keys)

    # Errors fall as lengths grow: the secant of their logarithms, within a bracket that holds the answer.
    low, high = math.log(row.limit * 3e-4), math.log(row.limit * 0.9)
    least, most = over(math.exp(low)), over(math.exp(high))
    if least <= 0 or most >= 0:
        return math.exp(low if least <= 0 else high)
    while high - low > INFERRED_WITHIN:
        middle = low + (high - low) * min(0.9, max(0.1, least / (least - most)))
        value = over(math.exp(middle))
        if abs(value) < INFERRED_WITHIN:
            return math.exp(middle)
        low, high, least, most = (middle, high, value, most) if value > 0 else (low, middle, least, value)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class Prediction:
    """The seconds by stage of a row, and real over predicted ones by the published key."""

    row: PublishedRow
    mean_response: float
    seconds: Seconds

    @property
    def ratios(self) -> dict[str, float]:
        """Return the ratios that count: of a row whose mean length was inferred, those of its stages."""
        inferred = self.row.mean_response is None
        return {k: ratio for k, ratio in ratios(self.row, self.seconds).items() if not (inferred and k == WHOLE_STEP)}


@lru_cache(maxsize=4096)
def prediction(row: PublishedRow, floors: EngineFloors, seeds: int = 1) -> Prediction:
    cost = AnalyticCost(row.cluster, floors)
    mean = row.mean_response or inferred_mean(row, cost, seeds)
    return Prediction(row, mean, predicted(row, mean, cost, seeds))


def loss(rows: Sequence[PublishedRow], floors: EngineFloors) -> float:
    """Return the mean of the logarithms' absolute errors: every source counts alike, whatever it published."""
    by_source: dict[str, list[float]] = {}
    for row in rows:
        by_source.setdefault(row.group, []).extend(abs(math.log(r)) for r in prediction(row, floors).ratios.values())
    return sum(sum(found) / len(found) for found in by_source.values() if found) / len(by_source)


def fitted(rows: Sequence[PublishedRow]) -> EngineFloors:
    """Return the floors that fit these rows best: one constant of `FITTED` after the other, until none changes."""
    floors, changed = FRAMEWORK, True
    while changed:
        changed = False
        for name, values in FITTED.items():
            tried = [replace(floors, **{name: value}) for value in values]
            best = min(tried, key=lambda one: loss(rows, one))
            if loss(rows, best) < loss(rows, floors) - 1e-9:
                floors, changed = best, True
    return floors


def left_out_errors(rows: Sequence[PublishedRow]) -> dict[str, float]:
    """Return the median error of each source's seconds by the floors fitted to all other sources."""
    found = {}
    for source in dict.fromkeys(row.group for row in rows if row.seconds):
        floors = fitted([row for row in rows if row.group != source and row.seconds])
        mine = [r for row in rows if row.group == source for r in prediction(row, floors).ratios.values()]
        found[source] = median(error(ratio) for ratio in mine)
    return found


def error(ratio: float) -> float:
    """Return |predicted / real - 1| of real over predicted seconds."""
    return abs(1 / ratio - 1)


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(float(np.median(found)), 3) if found else None


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation of predicted and real seconds."""
    if len(pairs) < 2:
        return None
    ours, theirs = (np.argsort(np.argsort(values)) for values in zip(*pairs, strict=True))
    return round(float(np.corrcoef(ours, theirs)[0, 1]), 3)


def summary(found: Sequence[Prediction]) -> dict[str, Any]:
    """Return predictions, and errors where seconds are published."""
    for each in found:
        shown = "  ".join(f"{stage} {seconds:.2f}" for stage, seconds in each.seconds.items())
        over = "  ".join(f"{stage} {ratio:.2f}" for stage, ratio in each.ratios.items())
        print(f"{each.row.id:24} {shown}   real / predicted: {over or 'not published'}", flush=True)
    whole = [each.ratios[WHOLE_STEP] for each in found if WHOLE_STEP in each.ratios]
    stages = [ratio for each in found for key, ratio in each.ratios.items() if key != WHOLE_STEP]
    pairs = [(e.row.seconds[key] / r, float(e.row.seconds[key])) for e in found for key, r in e.ratios.items()]
    return {
        "bench": "published",
        "rows": [
            {"id": each.row.id, "predicted": {stage: round(value, 3) for stage, value in each.seconds.items()}}
            | ({"inferred_mean_response": round(each.mean_response)} if each.row.mean_response is None else {})
            for each in found
        ],
        "median_error": {"stages": median(map(error, stages)), "steps": median(map(error, whole))},
        "rank": rank_correlation(pairs),
        "real_over_predicted": median([*stages, *whole]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=PUBLISHED_ROWS, help="a file of rows; default: the built-in ones")
    try:
        rows = read_rows(parser.parse_args(arguments).rows)
        found = summary([prediction(row, FRAMEWORK, SEEDS) for row in rows])
        print(json.dumps(found | {"left_out": left_out_errors(rows)}))
    except FuseError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
