"""The record of this plugin's feature, and its saving on a recorded run."""

from typing import TYPE_CHECKING

from verl_fuse.feature import Feature, Fits
from verl_fuse.simulate.saving import Saving
from verl_fuse.spec.composed import no_critic
from verl_fuse.spec.timeline import FUSED_UPDATE, TRAIN_STAGES

if TYPE_CHECKING:
    from verl_fuse.simulate.recorded import Recording


def _fused(run: "Recording") -> Saving:
    if run.stages.get(FUSED_UPDATE):
        return Saving("it was on: critic and actor trained as one", on=True)
    critic, actor = (run.stages.get(name, 0.0) for name in TRAIN_STAGES)
    if not critic:
        return Saving("no critic was trained")
    return Saving(
        f"nothing without pipeline parallelism, whose bubbles it fills; with it at most {min(critic, actor):.2f} s, "
        "`simulate` with a plan says"
    )


FEATURES = (
    Feature(
        "pipeline",
        {"pipeline.enabled": True},
        presets={"fast": {}},
        idle=no_critic,
        strategy="pipeline",
        saving=_fused,
        fits=Fits("fused actor and critic", "PPO", "Megatron", "any", "4 ranks"),
    ),
)
