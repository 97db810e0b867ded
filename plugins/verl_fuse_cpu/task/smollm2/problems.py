"""Draw the problems of reasoning-gym's families, and write them in the columns of verl's RLHFDataset.

Invariants (tests/unit/task/test_smollm2_problems.py):
- no question comes twice, in one data set or in two;
- a data set has every kind by its share, and no kind has more than 60 %;
- the same seed gives the same problems.

`short_prompts` has the kinds' bare questions, `long_prompts` each after `EXAMPLES` solved ones: lengths for benches.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.smollm2.kinds import KINDS, Kind, dataset

EXAMPLES = 4
# Examples are drawn out of so many problems of a kind, which are in no data set.
POOL = 40


@dataclass(frozen=True, slots=True)
class Problem:
    """A question of a kind, its answer, and what the verifier of the kind's family needs, as JSON. The chat before it
    has `examples`."""

    kind: str
    question: str
    answer: str
    truth: str
    examples: tuple["Problem", ...] = ()

    @property
    def chat(self) -> list[dict[str, str]]:
        solved = [turn for problem in self.examples for turn in (problem.asked, problem.answered)]
        return [*solved, self.asked]

    @property
    def asked(self) -> dict[str, str]:
        return {"role": "user", "content": self.question}

    @property
    def answered(self) -> dict[str, str]:
        return {"role": "assistant", "content": self.answer}


def data_sets(train: int, validation: int, seed: int) -> dict[str, list[Problem]]:
    """Return the problems of each data set, in an order of no meaning; those for benches have as many as `validation`.
    A FuseError names a kind that has too few questions."""
    counts = {"validation": validation, "train": train, "short_prompts": validation, "long_prompts": validation}
    found: dict[str, list[Problem]] = {name: [] for name in counts}
    mix = random.Random(seed)
    for kind in KINDS:
        stream = _questions(kind, seed)
        solved = list(itertools.islice(stream, POOL))
        for name, count in counts.items():
            examples = {"short_prompts": 0, "long_prompts": EXAMPLES}.get(name, kind.examples)
            for problem in itertools.islice(stream, shares(count)[kind.name]):
                found[name].append(replace(problem, examples=tuple(mix.sample(solved, examples))))
    for problems in found.values():
        mix.shuffle(problems)
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
            "prompt": problem.chat,
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
            yield Problem(kind.name, entry["question"].strip(), entry["answer"], json.dumps(truth, default=str))
    raise FuseError(f"{kind.name} has {len(seen)} questions: fewer problems are needed")
