"""Draw the problems of reasoning-gym's families, and write them in the columns of verl's RLHFDataset.

Invariants (tests/unit/task/test_smollm2_problems.py):
- no question comes twice, in one data set or in two;
- a data set has every kind by its share, and no kind has more than 60 %;
- the same seed gives the same problems.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.smollm2.kinds import KINDS, Kind, dataset


@dataclass(frozen=True, slots=True)
class Problem:
    """A question of a kind, and what the verifier of the kind's family needs, as JSON."""

    kind: str
    question: str
    truth: str


def data_sets(train: int, validation: int, seed: int) -> dict[str, list[Problem]]:
    """Return the problems of `train` and `validation`, in an order of no meaning; a FuseError names a kind that has too
    few questions."""
    counts = {"validation": validation, "train": train}
    found: dict[str, list[Problem]] = {name: [] for name in counts}
    for kind in KINDS:
        stream = _questions(kind, seed)
        for name, count in counts.items():
            found[name] += [next(stream) for _ in range(shares(count)[kind.name])]
    for problems in found.values():
        random.Random(seed).shuffle(problems)
    return found


def shares(count: int) -> dict[str, int]:
    """Return how many of `count` problems are of each kind; what rounding leaves goes to the first kinds."""
    whole = {kind.name: int(count * kind.share) for kind in KINDS}
    for kind in KINDS[: count - sum(whole.values())]:
        whole[kind.name] += 1
    return whole


def rows(problems: list[Problem], split: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": problem.kind,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": problem.truth},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]


def _questions(kind: Kind, seed: int) -> Iterator[Problem]:
    """Yield the kind's questions, each once."""
    # A family gives so many problems a seed; that many in a row that came before are a sign that there are no more.
    drawn = dataset(kind, seed)
    seen: set[str] = set()
    for entry in drawn:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            truth = {"answer": entry["answer"], "metadata": entry["metadata"]}
            yield Problem(kind.name, entry["question"].strip(), json.dumps(truth, default=str))
    raise FuseError(f"{kind.name} has {len(seen)} questions: fewer problems are needed")
