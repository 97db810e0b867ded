"""The task is to write out Euclid's algorithm by repeated subtraction, then the greatest common divisor.

The prompt `gcd 07 03` has the response `04 03;01 03;01 02;01 01;=01`. A response has one line per subtraction. The
number of lines is the sum of the partial quotients of a/b; its distribution is long-tailed by nature, and
`tail_exponent` makes the tail longer. With a calculator (calculator.py) each subtraction is a turn.

Invariants (tests/unit/task/test_euclid.py):
- the last line of a trace holds the answer twice, and the answer is gcd(a, b);
- training and validation share no pair;
- the 99th percentile of the trace lengths is at least 5 times their median;
- the same seed gives the same problems.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Numbers are written with two digits.
LARGEST_ALLOWED = 99


@dataclass(frozen=True, slots=True)
class Pair:
    """Two different numbers, 1 to 99."""

    a: int
    b: int

    @property
    def answer(self) -> int:
        return math.gcd(self.a, self.b)

    @property
    def prompt(self) -> str:
        return f"gcd {self.a:02d} {self.b:02d}"

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the pair after each subtraction of the smaller number from the larger one."""
        return tuple(f"{a:02d} {b:02d}" for a, b in _subtractions(self.a, self.b))

    @property
    def trace(self) -> str:
        return response(self.lines, self.answer)

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """Return the calculator's question for each subtraction, and its answer."""
        before = (self.a, self.b)
        calls = []
        for after in _subtractions(self.a, self.b):
            calls.append((f"{max(before):02d}-{min(before):02d}", f"{max(before) - min(before):02d}"))
            before = after
        return tuple(calls)


def response(lines: tuple[str, ...], answer: int) -> str:
    return "".join(f"{line};" for line in lines) + f"={answer:02d}"


def _subtractions(a: int, b: int) -> Iterator[tuple[int, int]]:
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        yield a, b


def all_pairs(largest: int) -> list[Pair]:
    return [Pair(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1) if a != b]


def long_tailed_weights(pairs: list[Pair], exponent: float) -> np.ndarray:
    """Return probabilities, one per pair, under which a trace of k lines is drawn in proportion to k**-exponent."""
    lines = np.array([len(pair.lines) for pair in pairs])
    weights = lines.astype(float) ** -exponent / np.bincount(lines)[lines]
    return weights / weights.sum()


def held_out(pairs: list[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return (kept, held out) pairs: a random fifth of the pairs, whatever their difficulty, is never trained on."""
    order = np.random.default_rng(seed).permutation(len(pairs))
    first_kept = len(pairs) // 5
    return [pairs[i] for i in order[first_kept:]], [pairs[i] for i in order[:first_kept]]


def draw(pairs: list[Pair], count: int, exponent: float, seed: int) -> list[Pair]:
    """Draw `count` problems of long-tailed difficulty; pairs may repeat, since few pairs have the shortest traces."""
    chosen = np.random.default_rng(seed).choice(len(pairs), size=count, p=long_tailed_weights(pairs, exponent))
    return [pairs[i] for i in chosen]
