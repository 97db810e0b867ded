"""The records of this plugin's features, and their savings on a recorded run."""

from typing import TYPE_CHECKING

from verl_fuse.feature import Feature, Fits
from verl_fuse.simulate.saving import Saving
from verl_fuse.spec.composed import ROLLOUT, Get, one_replica

if TYPE_CHECKING:
    from verl_fuse.simulate.recorded import Recording


def _one_sample(get: Get) -> str | None:
    return "a prompt has one sample (rollout.n)" if (get(f"{ROLLOUT}.n") or 1) < 2 else one_replica(get)


def _elastic(run: "Recording") -> Saving:
    """Lengths are known in advance: no prediction can do better."""
    import numpy as np

    from verl_fuse.simulate.draw import DrawnLengths
    from verl_fuse.simulate.elastic import best_assignment, run_elastic
    from verl_fuse.simulate.recorded import begin

    if not run.dedicated:
        return Saving("devices are shared and saturated: a replica that stops leaves none free")
    faster, held = [], []
    for step, timing in zip(run.steps, run.timings, strict=True):
        group = np.arange(len(step.replica))
        lengths = DrawnLengths(group, step.prompt, step.response, step.response)
        done = run_elastic(lengths, timing, best_assignment(lengths, timing, step.replicas, run.options), run.options)
        base = begin(step, timing).advance().seconds
        faster.append(base - done.seconds)
        held.append(float(done.ends.sum()) / step.replicas - base)
    gained, given = float(np.mean(faster)), max(0.0, -float(np.mean(held)) / run.seconds)
    note = "device time given back if every length had been known" + (f"; {-gained:.2f} s longer" if gained < 0 else "")
    return Saving(note, gained if given else max(0.0, gained), given, replayed=True)


FEATURES = (
    Feature(
        "routing",
        {"elastic.enabled": True},
        presets={"safe": {}, "fast": {}},
        idle=_one_sample,
        fits=Fits("routing, elastic replicas", "several samples a prompt", "any", "vLLM", "3 nodes on one host"),
    ),
    Feature(
        "scaling",
        {"elastic.scale": True, "elastic.enabled": True, "elastic.release": True},
        strategy="scaling",
        saving=_elastic,
        bound=True,
    ),
)
