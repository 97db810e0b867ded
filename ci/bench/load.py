"""Measure the control plane under load: the time of verl-fuse itself in a step of many replicas and samples, on the
driver.

These parts are real: the trainer of mode `fuse` with its replica moves, hooks and accounts, verl's replay buffer and
load balancer, TransferQueue and Ray; the plugins `interstage` (slices, a migrating tail), `elastic` and `observe` are
on. Behind verl's replica interface are engines that take a given time, all in one process (support/engines.py), which
writes the rows that agent loops write, with tags and without tokens; nothing is computed from the rows and no weights
move. A response has up to 32k tokens, lognormal, and the longest takes `--seconds`.

The parts are CPU milliseconds of the driver's thread in a step: plan (prompts in), poll (verl's own look at
TransferQueue), decide (verl-fuse's decisions), migrate, balance (verl's own balancing of the batch over ranks), account
(the rest of the batch, account, timeline, metrics). `own_share` is the time of all parts but verl's two, over the
seconds of the step; `driver_share` is the time of the whole process, the threads of TransferQueue, of Ray and of the
timeline's writer included. The first step of a shape warms up and is left out.

    python -m ci.bench.load [--shapes 8x1024 64x8192 256x16384] [--seconds 60]
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_fuse_cpu.environment import environment as cpu_environment

if TYPE_CHECKING:
    from ci.bench.support.loaded import LoadTrainer

SAMPLES_PER_PROMPT, LONGEST, MEDIAN, SIGMA = 8, 32_768, 2_000, 1.1
SHAPES = ("8x1024", "64x8192", "256x16384")
OWN, VERL_S = ("plan", "decide", "migrate", "account"), ("poll", "balance")
WARM_SECONDS = 5.0


class Meter:
    """Count the seconds and calls of each part, by `clock`; time of a part within another part counts for the inner
    part alone."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._within: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Count from zero."""
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def of(self, name: str, call: Callable) -> Callable:
        """Return `call`, counted as this part."""

        def measured(*arguments: Any, **named: Any) -> Any:
            begun = self._clock()
            self._within.append(0.0)
            try:
                return call(*arguments, **named)
            finally:
                spent, within = self._clock() - begun, self._within.pop()
                self.seconds[name] += spent - within
                self.calls[name] += 1
                if self._within:
                    self._within[-1] += spent

        return measured


def lengths(samples: int, seed: int) -> np.ndarray:
    """Return response tokens by prompt and sample; the longest sample has LONGEST tokens."""
    rng = np.random.default_rng(seed)
    drawn = np.clip(MEDIAN * np.exp(SIGMA * rng.standard_normal(samples)), 16, LONGEST).astype(int)
    drawn[rng.integers(samples)] = LONGEST
    return drawn.reshape(-1, SAMPLES_PER_PROMPT)


def measured_step(trainer: "LoadTrainer", meter: Meter, samples: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run one step of a shape, and return its figures."""
    meter.begin()
    trainer.ask_for(lengths(samples, seed))
    trainer.manager.pace(seconds / LONGEST)
    begun, spent = time.monotonic(), time.process_time()
    metrics = trainer.run()
    passed, spent = time.monotonic() - begun, time.process_time() - spent
    own = sum(meter.seconds[part] for part in OWN)
    return {
        "seconds": round(passed, 2),
        "polls": meter.calls["poll"],
        **{f"{part}_ms": round(1e3 * meter.seconds[part], 1) for part in (*OWN, *VERL_S)},
        "own_us_per_sample": round(1e6 * own / samples, 1),
        "driver_cpu_seconds": round(spent, 2),
        "driver_share": round(spent / passed, 4),
        "own_share": round(own / passed, 4),
        "driver_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "moved": trainer.manager.moved(),
        "lost": int(metrics["fuse/samples_missing"]),
        "fallbacks": int(metrics["fuse/fallbacks"]),
    }


def run(shapes: list[tuple[int, int]], seconds: float) -> list[dict[str, Any]]:
    from ci.bench.support.untrained import local_cluster

    variables = {**cpu_environment(), "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    with local_cluster(variables, object_store_bytes=200_000_000):
        from ci.bench.support.loaded import balancing_measured, loaded_trainer
        from verl_fuse.host.record.spans import start_collector

        cases, collector = [], start_collector()
        for replicas, samples in shapes:
            with tempfile.TemporaryDirectory() as folder:
                meter = Meter()
                trainer = loaded_trainer(Path(folder), replicas, samples // SAMPLES_PER_PROMPT, meter, collector)
                with balancing_measured(meter):
                    measured_step(trainer, meter, samples, min(WARM_SECONDS, seconds), 0)
                    found = measured_step(trainer, meter, samples, seconds, 1)
                trainer.close()
            cases.append({"replicas": replicas, "samples": samples, **found})
            print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
        return cases


def shape(text: str) -> tuple[int, int]:
    """Return the replicas and samples of "64x8192"."""
    replicas, samples = map(int, text.split("x"))
    if replicas < 2 or samples % SAMPLES_PER_PROMPT:
        raise argparse.ArgumentTypeError(f"{text}: two replicas or more, and samples in groups of {SAMPLES_PER_PROMPT}")
    return replicas, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=shape, default=[shape(text) for text in SHAPES])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the longest response")
    args = parser.parse_args()
    # The environment is set before verl is imported, here and in Ray's processes.
    os.environ.update(cpu_environment())
    warnings.simplefilter("ignore")
    print(json.dumps({"bench": "load", "cases": run(args.shapes, args.seconds)}))


if __name__ == "__main__":
    main()
