"""Choose a replica for each prompt: each replica gets a run of similar predicted length, and the step ends as early as
such runs allow.

Invariants (tests/unit/elastic/test_assignment.py):
- every prompt gets one replica, so that its samples share their prefix;
- sorted by predicted length, each replica's prompts are neighbours;
- no replica gets more than CROWD times an even share of the samples, but for a single prompt;
- no other such cut into runs ends the slowest replica earlier (to TOLERANCE), by the cost given, where all
  predictions have the same spread;
- no replica is left without a prompt while another has two.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import ReplicaView
from verl_fuse.timeline.decode import DecodeCost

# This cost balances predicted tokens alone, before any decode step was measured.
TOKENS_ALONE = DecodeCost(0.0, 1.0)
CUT_TOLERANCE = 0.005
# A replica gets at most so many even shares of the samples: predictions err, and the cost of a decode step was measured
# for even shares, not for crowds.
CROWD = 2.0
# Prompts without a prediction count as equally long.
UNKNOWN_LENGTH = Prediction(1.0, 1.0)


def assign(
    prompts: Sequence[Prompt],
    ranks: Sequence[int],
    slots: int,
    cost: DecodeCost = TOKENS_ALONE,
    limit: float = math.inf,
) -> Mapping[str, int]:
    """Return the replica rank of each prompt uid. `slots`: sequences that a replica runs at once; `limit`: tokens that
    a response may have."""
    line = Line(prompts, slots, cost, limit)
    runs = zip(ranks, pairwise(line.cut(len(ranks))), strict=False)
    return {prompt.uid: rank for rank, (a, b) in runs for prompt in line.prompts[a:b]}


def fewest_slots(replicas: Sequence[ReplicaView]) -> int:
    """Return the number of sequences that any replica can run at once, by the lengths of recent steps."""
    return min((replica.slots for replica in replicas), default=1)


class Line:
    """Prompts in a row, the longest first, to be cut into runs.

    A replica takes as many decode steps as the longest response of its run has tokens, or as the run's tokens need in
    `slots` sequences at once; a step costs `cost.step`, and each token costs `cost.sequence` besides; `each` are
    seconds of a sample beside decoding. The longest of k responses is taken to lie as far above the longest prediction
    as the largest of k normal numbers does in logarithms, and at `limit` tokens at most.
    """

    def __init__(
        self, prompts: Sequence[Prompt], slots: int, cost: DecodeCost, limit: float = math.inf, each: float = 0.0
    ):
        def length(prompt: Prompt) -> tuple[float, float]:
            prediction = prompt.prediction or UNKNOWN_LENGTH
            return prediction.tokens, prediction.upper

        self.prompts = sorted(prompts, key=length, reverse=True)
        lengths = [length(prompt) for prompt in self.prompts]
        self._tokens = [max(tokens, 1.0) for tokens, _ in lengths]
        self._spread = [max(1.0, upper / max(tokens, 1.0)) for tokens, upper in lengths]
        samples = [prompt.samples for prompt in self.prompts]
        self._samples = [0, *accumulate(samples)]
        self._before = [0.0, *accumulate(t * n for t, n in zip(self._tokens, samples, strict=True))]
        self._farthest = _farthest(self._samples[-1])
        self._slots, self._cost, self._limit, self._each = slots, cost, limit, each
        self._slowest = max((self.seconds(i, i + 1) for i in range(len(samples))), default=0.0)

    def seconds(self, start: int, end: int) -> float:
        """Return the seconds for which a replica generates the run from `start` to `end`, at the earliest."""
        if start == end:
            return 0.0
        tokens = self._before[end] - self._before[start]
        samples = self._samples[end] - self._samples[start]
        beyond = self._farthest[samples]
        longest = min(self._limit, self._tokens[start] * self._spread[start] ** beyond)
        return self._lasts(longest, tokens, samples)

    def afterwards(self, start: int, end: int, generated: Mapping[str, Prediction]) -> float:
        """Return the seconds of the run from `start` to `end` by the lengths that were generated: `generated` has the
        mean and the longest response of each prompt, by uid. Prompts that are not there count for nothing."""
        run = [(generated[p.uid], p.samples) for p in self.prompts[start:end] if p.uid in generated]
        longest = max((length.upper for length, _ in run), default=0.0)
        return self._lasts(longest, sum(length.tokens * n for length, n in run), sum(n for _, n in run))

    def _lasts(self, longest: float, tokens: float, samples: int) -> float:
        decoding = self._cost.step * max(longest, tokens / self._slots) + self._cost.sequence * tokens
        return decoding + self._each * samples

    def cut(self, count: int) -> list[int]:
        """Return the places where at most `count` runs begin, and the place where the last run ends."""
        size = len(self.prompts)
        if not size:
            return [0]
        crowd = CROWD * self._samples[-1] / count
        best = self._filled(math.inf, count, crowd)
        assert best is not None, "runs that are full to half of the crowd"
        # No cut is faster than the slowest prompt alone, or than equal shares of all tokens.
        share = self._before[-1] / count * (self._cost.sequence + self._cost.step / self._slots)
        low, high = max(self._slowest, share), max(self.seconds(*run) for run in pairwise(best))
        at_once = self._filled(low, count, crowd)
        if at_once is not None:
            best, high = at_once, low
        while high - low > CUT_TOLERANCE * high:
            middle = (low + high) / 2
            cuts = self._filled(middle, count, crowd)
            if cuts is not None:
                best, high = cuts, middle
            else:
                low = middle
        return self._split(best, count)

    def _filled(self, seconds: float, count: int, crowd: float) -> list[int] | None:
        """Return the fewest runs of up to `crowd` samples that each take up to `seconds`, which every prompt alone
        does; None if there are more than `count` runs."""
        size = len(self.prompts)
        cuts = [0]
        while cuts[-1] < size and len(cuts) <= count:
            start = cuts[-1]
            room = max(start + 1, bisect_right(self._samples, self._samples[start] + crowd) - 1)
            fits = bisect_right(range(room + 1), seconds, start + 2, key=lambda end: self.seconds(start, end)) - 1
            cuts.append(fits)
        return cuts if cuts[-1] == size else None

    def _split(self, cuts: list[int], count: int) -> list[int]:
        """Return as many runs as there are replicas, where there are prompts enough: the slowest run that has two
        prompts is cut in the middle of its tokens."""
        cuts = list(cuts)
        while len(cuts) <= count and len(cuts) <= len(self.prompts):
            longer = [(a, b) for a, b in pairwise(cuts) if b - a > 1]
            a, b = max(longer, key=lambda run: self.seconds(*run))
            half = (self._before[a] + self._before[b]) / 2
            middle = bisect_left(self._before, half)
            cuts.append(min(max(middle, a + 1), b - 1))
            cuts.sort()
        return cuts


@lru_cache(maxsize=8)
def _farthest(samples: int) -> list[float]:
    """Return for k = 0 to `samples` where the largest of k normal numbers lies, in units of the 0.9 quantile that
    `Prediction.upper` is."""
    normal = NormalDist()
    unit = normal.inv_cdf(0.9)
    return [0.0, *(max(0.0, normal.inv_cdf(k / (k + 1))) / unit for k in range(1, samples + 1))]
