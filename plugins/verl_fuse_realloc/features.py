"""The record of this plugin's feature."""

from collections.abc import Mapping

from verl_fuse.feature import Feature, Fits
from verl_fuse.spec.timeline import UPDATE_WEIGHTS


def _all_of_the_sync(stages: Mapping[str, float]) -> str:
    sync = stages.get(UPDATE_WEIGHTS, 0.0)
    return f"saves at most the {sync:.2f} s of the weight sync; `verl-fuse ab` measures it"


FEATURES = (
    Feature(
        "weight_sync",
        {"realloc.weight_sync": "shards"},
        most=_all_of_the_sync,
        fits=Fits("weights by shards", "any", "FSDP2, Megatron", "vLLM", "gloo"),
    ),
)
