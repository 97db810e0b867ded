"""Reads the cost of decoding off a step's timeline. Pure: a timeline in, seconds out.

Invariants (tests/unit/interstage/test_measured.py):
- a timeline made with given decode costs gives them back;
- time a request waited in its replica's queue, for a place in the batch or for room in the KV cache, is not counted
  as decoding;
- the configured limit of a response does not matter;
- a timeline without enough facts gives None, never a guess.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_fuse.spec.arrays import Floats
from verl_fuse.spec.step import Capacity
from verl_fuse.spec.timeline import REPLICA, REQUEST, Span, Timeline
from verl_fuse.timeline.tracks import role

# Rounds of the fit and of the numbers of steps beside so many sequences that follow from it.
ITERATIONS = 8


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """The cost of decoding: a decode step of b sequences takes `step + sequence * b` seconds."""

    step: float
    sequence: float

    def seconds(self, sequences: Floats) -> Floats:
        """Return the seconds of a decode step, in which each sequence gets a token."""
        return self.step + self.sequence * sequences


def decode_cost(timeline: Timeline, capacity: Capacity) -> DecodeCost | None:
    """Fit the cost over all requests, of which a replica runs as many at once as its engine's `capacity` allows:
    seconds per token against sequences beside the request, per step."""
    replicas = []
    for track in timeline.tracks:
        if role(track) != REPLICA:
            continue
        requests = [
            span for span in timeline.on(track) if span.name == REQUEST and int(span.args.get("response_tokens", 0)) > 0
        ]
        if requests:
            tokens = np.array([int(span.args["response_tokens"]) for span in requests], np.float64)
            replicas.append(_Decoding.of(*admitted(requests, capacity), tokens))
    if not replicas:
        return None
    pace = np.concatenate([replica.seconds / replica.tokens for replica in replicas])
    weight = np.sqrt(np.concatenate([replica.tokens for replica in replicas]))
    cost = DecodeCost(1.0, 0.0)
    for _ in range(ITERATIONS):
        beside = np.concatenate([replica.mean_running(cost) for replica in replicas])
        cost = _fit(pace, beside, weight)
    return cost


def _fit(pace: Floats, beside: Floats, weight: Floats) -> DecodeCost:
    """Fit least squares over the requests: seconds per token against the requests `beside` each."""
    columns = np.stack([weight, weight * beside], axis=1)
    (step, sequence), _, rank, _ = np.linalg.lstsq(columns, weight * pace, rcond=1e-6)
    if rank < 2 or sequence < 0 or step <= 0:
        # All requests ran beside about as many other requests: only their mean pace is known.
        return DecodeCost(float(np.average(pace, weights=weight**2)), 0.0)
    return DecodeCost(float(step), float(sequence))


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The requests of one replica: `seconds` and `tokens` of each, and the number of requests `running` between each
    two moments at which one begins or ends. `first` and `last` are the places of each request's begin and end among
    the moments, which are `lengths` seconds apart."""

    seconds: Floats
    tokens: Floats
    running: Floats
    lengths: Floats
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def of(cls, starts: Floats, ends: Floats, tokens: Floats) -> "_Decoding":
        times = np.concatenate([starts, ends])
        order = np.argsort(times, kind="stable")
        running = np.cumsum(np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])[order])[:-1]
        times = times[order]
        first, last = np.searchsorted(times, starts), np.searchsorted(times, ends)
        return cls(ends - starts, tokens, running, np.diff(times), first, last)

    def mean_running(self, cost: DecodeCost) -> Floats:
        """Return the number of requests that ran, itself included, in the mean decode step of each request, with the
        number of steps beside so many requests taken from `cost`."""
        steps = self.lengths / (cost.step + cost.sequence * self.running)

        def spent(amount: Floats) -> Floats:
            total = np.concatenate([[0.0], np.cumsum(amount)])
            return total[self.last] - total[self.first]

        return spent(steps * self.running) / np.maximum(spent(steps), 1e-12)


def admitted(requests: Sequence[Span], capacity: Capacity) -> tuple[Floats, Floats]:
    """Return (start, end) of each request's decoding: first come, first served, as soon as there is a place in the
    batch and the KV cache holds the prompt beside the running requests (vLLM's scheduler). The prompt tokens that the
    engine had in its cache are not counted. The timeline does not tell which requests were preempted: their waiting
    time counts as decoding."""
    starts, ends = [0.0] * len(requests), [0.0] * len(requests)
    prompts = [int(s.args.get("prompt_tokens", 0)) - int(s.args.get("cached_tokens", 0)) for s in requests]
    responses = [int(span.args["response_tokens"]) for span in requests]
    running: list[tuple[float, int]] = []
    now = origin = min((span.start for span in requests), default=0.0)
    # Tokens in the KV cache at `origin` and per second since: each request that runs grows evenly. Summed up as
    # requests come and go, for there may be thousands.
    held = growth = 0.0

    def share(index: int) -> tuple[float, float]:
        """Return the context of one request as a line over time: its value at `origin`, and its growth per second."""
        seconds = ends[index] - starts[index]
        if seconds <= 0:
            return prompts[index] + responses[index], 0.0
        pace = responses[index] / seconds
        return prompts[index] - pace * (starts[index] - origin), pace

    def next_end() -> float:
        nonlocal held, growth
        end, index = heapq.heappop(running)
        tokens, pace = share(index)
        held, growth = held - tokens, growth - pace
        return end

    for index in sorted(range(len(requests)), key=lambda i: requests[i].start):
        span = requests[index]
        now = max(now, span.start)
        while running and running[0][0] <= now:
            next_end()
        while running and (
            len(running) >= capacity.sequences or held + growth * (now - origin) + prompts[index] >= capacity.tokens
        ):
            now = next_end()
        starts[index], ends[index] = min(now, span.end), span.end
        tokens, pace = share(index)
        held, growth = held + tokens, growth + pace
        heapq.heappush(running, (span.end, index))
    return np.array(starts), np.array(ends)
