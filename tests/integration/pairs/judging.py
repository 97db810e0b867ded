"""What a row's run must show, beside stock verl: a whole account, verl's numbers, the rollout's probabilities, and
features that do their work."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rows import STEPS
from table import Row

# Largest differences of what slices or streams compute to verl's own stages in the same step, by precision of what
# computes it: micro-batches are cut otherwise, and with them the order of sums.
LOG_PROBS = {"fp32": 1e-4, "bf16": 0.2}
VALUES = {"fp32": 5e-5, "bf16": 0.2}
# Advantages are whitened, and a return sums over a response.
ADVANTAGES = {"fp32": 1e-3, "bf16": 1.0}
# Of losses and gradient norms, relative; below the absolute one nothing counts.
LEARNED = {"fp32": 1e-3, "bf16": 0.1}
LEARNED_ABSOLUTE = {"fp32": 1e-5, "bf16": 1e-2}
# Of a token's probability between rollout and trainer in float32.
GAP = 1e-3
# The same in other settings, as a multiple of stock verl's.
TIMES_STOCK = 2.0


@dataclass(frozen=True)
class Figures:
    """Of all steps of a row: samples trained and asked for, missing, twice; the largest gap between rollout and
    trainer, that of stock verl on the same rollouts, the largest difference of a number computed and (relative) of one
    learned; what moved and streamed."""

    samples: int
    expected: int
    missing: int
    duplicated: int
    gap: float | None
    stock_gap: float | None
    computed: float
    learned: float
    migrations: int
    streamed: int


def figures(done: Mapping[str, Any]) -> Figures:
    records, metrics = done["records"].values(), done["metrics"].values()
    gaps = {
        whose: [record["gap"][whose] for record in records if record["gap"][whose] is not None]
        for whose in ("fused", "stock")
    }
    return Figures(
        samples=sum(record["samples"] for record in records),
        expected=sum(record["expected"] for record in records),
        missing=sum(account["missing"] for account in done["accounts"].values()),
        duplicated=sum(record["duplicated"] for record in records),
        gap=max(gaps["fused"], default=None),
        stock_gap=max(gaps["stock"], default=None),
        computed=max((value for record in records for value in record["differences"].values()), default=math.nan),
        learned=max((_relative(*pair) for record in records for pair in record["learned"].values()), default=math.nan),
        migrations=int(sum(step.get("fuse/migrations", 0) for step in metrics)),
        streamed=int(sum(step.get("fuse/streamed_samples", 0) for step in metrics)),
    )


def faults(done: Mapping[str, Any], stock_gap: float | None) -> list[str]:
    """What is wrong with a row's run, in words; `stock_gap` is that of a run of stock verl in the same
    setting, where one is needed."""
    if done["code"]:
        return [f"the run ended with exit code {done['code']}"]
    row: Row = done["row"]
    return [*_account(done), *_numbers(done, row), *_gap(done, row, stock_gap), *_work(done, row)]


def _account(done: Mapping[str, Any]) -> Iterator[str]:
    steps = [str(step + 1) for step in range(STEPS)]
    for name in ("records", "metrics", "accounts"):
        if sorted(done[name]) != steps:
            yield f"{name} of steps {', '.join(sorted(done[name]))}, not of {', '.join(steps)}"
    for step, record in done["records"].items():
        missing = done["accounts"].get(step, {}).get("missing")
        if record["samples"] != record["expected"] or missing or record["duplicated"]:
            yield (
                f"step {step}: {record['samples']} of {record['expected']} samples, {missing} missing, "
                f"{record['duplicated']} twice"
            )


def _numbers(done: Mapping[str, Any], row: Row) -> Iterator[str]:
    policy = "bf16" if row["precision"] == "bf16" else "fp32"
    reference = "fp32" if row["precision"] == "fp32" else "bf16"
    # With the reference's divergence in the reward, what is returned rests on both.
    reward = reference if row["algorithm"] == "ppo" else policy
    allowed = {
        "old_log_probs": LOG_PROBS[policy],
        "ref_log_prob": LOG_PROBS[reference],
        "values": VALUES[policy],
        "advantages": ADVANTAGES[reward],
        "returns": ADVANTAGES[reward],
    }
    for step, record in done["records"].items():
        for name, value in record["differences"].items():
            if not value <= allowed[name]:
                yield f"step {step}: {name} differ from stock's by {value:.2g}, allowed {allowed[name]:.2g}"
        for name, (stock, ours) in record["learned"].items():
            if _relative(stock, ours) > LEARNED[reward] and abs(stock - ours) > LEARNED_ABSOLUTE[reward]:
                yield f"step {step}: {name} is {ours:.6g}, stock's {stock:.6g}"


def _gap(done: Mapping[str, Any], row: Row, stock_gap: float | None) -> Iterator[str]:
    for step, record in done["records"].items():
        ours, stock = record["gap"]["fused"], record["gap"]["stock"]
        if (ours is None) != (stock is None):
            yield f"step {step}: gap to the rollout {ours}, stock's {stock}"
            continue
        if ours is None:
            continue
        bounds = {"twice stock's on the same rollout": max(TIMES_STOCK * stock, 1e-6)}
        if exact(row):
            bounds["what float32 allows"] = GAP
        if stock_gap is not None:
            bounds["twice a stock run's"] = TIMES_STOCK * stock_gap
        for what, bound in bounds.items():
            if not ours <= bound:
                yield f"step {step}: rollout_probs_diff_max {ours:.2g} is above {what}, {bound:.2g}"


def needs_stock(row: Row) -> bool:
    """Whether the gap that is allowed is that of a run of stock verl: where a rollout in float32
    meets a trainer in less."""
    return row["precision"] == "bf16" and row["sampling"] != "penalty" and row["correction"] != "bypass"


def exact(row: Row) -> bool:
    """Whether rollout and trainer compute the same numbers in float32. Penalties change the rollout's probabilities
    alone, in stock verl too."""
    return row["precision"] != "bf16" and row["sampling"] != "penalty"


def streams(row: Row) -> bool:
    """Whether there is anything to stream: without reference and critic, and with the rollout's log-probs
    for old ones, there is not; values on the critic's own devices are not streamed alone, and those of its own update
    not at all."""
    beside = row["algorithm"] == "ppo-kl" and row["placement"] == "none" and row["critic"] == "last"
    inference = row["correction"] != "bypass" or row["algorithm"] in ("ppo", "grpo+kl") or beside
    return row["interstage"] != "off" and inference


def _work(done: Mapping[str, Any], row: Row) -> Iterator[str]:
    for step, metrics in done["metrics"].items():
        if metrics.get("fuse/fallbacks", 0):
            yield f"step {step}: {metrics['fuse/fallbacks']:g} policies failed"
        drafted = metrics.get("fuse/speculation_drafted_tokens", 0)
        if (row["speculation"] == "on") != (drafted > 0):
            yield f"step {step}: {drafted:g} tokens were drafted"
        moved = metrics.get("fuse/migrations", 0)
        gains = row["interstage"].startswith("slices") and streams(row)
        if moved and not gains and row["elastic"] != "cut":
            yield f"step {step}: {moved:g} requests moved though nothing is gained"
        if (row["critic"] == "first") != (metrics.get("fuse/update_own_values", 0) > 0):
            yield f"step {step}: the critic's update did not compute the values, or was not asked to"
    if streams(row) and not any(metrics.get("fuse/streamed_samples", 0) for metrics in done["metrics"].values()):
        yield "no sample was streamed in any step"
    # Few seats leave no room to move to, and some sampling parameters keep a request where it is. A replica may also be
    # freed with nothing left on it; on a busy machine a step may end before its tail is looked at.
    if (
        row["interstage"] == "slices+tail"
        and streams(row)
        and row["seats"] == "many"
        and row["sampling"] == "plain"
        and not any(m.get("fuse/migrations", 0) or m.get("fuse/overlap_seconds", 0) for m in done["metrics"].values())
    ):
        yield "no tail moved in any step"


def _relative(stock: float, ours: float) -> float:
    if stock == ours:
        return 0.0
    return abs(stock - ours) / max(abs(stock), 1e-12)
