"""The record of this plugin's feature, and its saving on a recorded run."""

from typing import TYPE_CHECKING

from verl_fuse.cost.drafter import FIGURES
from verl_fuse.feature import Feature, Fits
from verl_fuse.simulate.saving import Saving
from verl_fuse.spec.composed import Get, on_accelerators

if TYPE_CHECKING:
    from verl_fuse.simulate.recorded import Recording


def _slower(get: Get) -> str | None:
    return FIGURES if on_accelerators(get) else None


def _drafts(run: "Recording") -> Saving:
    from verl_fuse.simulate.recorded import begin, fit_decode

    figures, acceptance = f"; {FIGURES}" if run.accelerator else "", run.options.acceptance
    if "speculation" in run.on:
        return Saving("it was on: the replay decodes as fast as the run did with drafts" + figures, on=True)
    if acceptance is None:
        return Saving("no acceptance is known: --set acceptance=SHARE assumes one" + figures, known=False)
    saved = [
        before.seconds - begin(step, fit_decode(step).timing(step, acceptance, run.accelerator)).advance().seconds
        for before, step in zip(run.through, run.steps, strict=True)
    ]
    note = f"if {acceptance:.0%} of the drafted tokens are accepted once those before them were"
    return Saving(note + figures, max(0.0, sum(saved) / len(saved)), replayed=True)


FEATURES = (
    Feature(
        "speculation",
        {"speculation.enabled": True},
        presets={"fast": {}},
        slower=_slower,
        measured=1.43,
        strategy="speculation",
        saving=_drafts,
        fits=Fits("speculation", "any", "any", "vLLM", "vLLM 0.24 and 0.28"),
    ),
)
