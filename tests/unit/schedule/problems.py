"""Problems the schedule tests share."""

import json
import random
from pathlib import Path

from verl_fuse.spec.problem import Pipeline, ScheduleProblem

PUBLISHED = json.loads((Path(__file__).parents[2] / "golden" / "fused_schedule_instances.json").read_text())[
    "instances"
]


def published(row: dict, memory_limit: float | None = None) -> ScheduleProblem:
    """One of the 12 published instances: the big model forward over all ranks, copies of the small one reversed."""
    big = Pipeline("actor", range(row["n0"]), row["m0"], row["f0"], 2 * row["f0"], row["mem0"])
    copies = [
        Pipeline(
            "critic",
            range((k + 1) * row["n1"] - 1, k * row["n1"] - 1, -1),
            row["m1"],
            row["f1"],
            2 * row["f1"],
            row["mem1"],
        )
        for k in range(row["n0"] // row["n1"])
    ]
    return ScheduleProblem(row["n0"], (big, *copies), memory_limit)


def two_ranks(microbatches: int = 2, memory_limit: float | None = None, transfer: float = 0.0) -> ScheduleProblem:
    actor = Pipeline("actor", (0, 1), microbatches, 1, 2, 1)
    critic = Pipeline("critic", (1, 0), microbatches, 1, 2, 1)
    return ScheduleProblem(2, (actor, critic), memory_limit, transfer)


def random_problem(seed: int, ranks: int = 4, pipelines: int = 3, microbatches: int = 5) -> ScheduleProblem:
    """Any number of pipelines, any placement, stage costs, transfer and memory limit; whole,
    decimal or irregular numbers."""
    draw = random.Random(seed)
    ranks = draw.randint(1, ranks)
    unit = draw.choice([lambda: draw.randint(1, 6), lambda: draw.randint(1, 60) / 10, lambda: draw.uniform(0.1, 5)])
    rows = []
    for _ in range(draw.randint(1, pipelines)):
        placed = draw.sample(range(ranks), draw.randint(1, ranks))
        costs = [[float(unit()) for _ in placed] for _ in range(2)]
        held = [draw.choice([0.0, 1.0, 0.7, draw.uniform(0, 3)]) for _ in placed]
        rows.append(Pipeline(draw.choice(["actor", "critic"]), placed, draw.randint(1, microbatches), *costs, held))
    transfer = draw.choice([0.0, 0.0, 1.0, 0.25])
    free = ScheduleProblem(ranks, tuple(rows), None, transfer)
    limit = draw.choice([None, free.least_memory_limit * draw.uniform(1, 4), free.least_memory_limit])
    return ScheduleProblem(ranks, free.pipelines, limit, transfer)
