"""What `fuse.elastic` refuses by key, and what it leaves alone."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_fuse.spec.composed import getter
from verl_fuse_elastic.refusals import refusals

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
FITS = {"trainer.v1.trainer_mode": "fuse", f"{ROLLOUT}.name": "vllm", "fuse.elastic.enabled": True}
STANDALONE = {"fuse.elastic.standalone": 1}
RELEASE = {"fuse.elastic.release": True}


def refused(changes: dict[str, Any]) -> dict[str, str]:
    """Return key -> the text of its refusal."""
    config = OmegaConf.create({})
    for key, value in (FITS | changes).items():
        OmegaConf.update(config, key, value)
    return {refusal.key: refusal.allowed for refusal in refusals(getter(config))}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fuse.elastic.min_replicas": 2, "fuse.elastic.max_replicas": 2},
        RELEASE | {"fuse.elastic.cut_fraction": 0.8},
        RELEASE | {f"{ROLLOUT}.disaggregation.enabled": True, "fuse.elastic.cut_fraction": 1.0},
        {"fuse.elastic.cut_fraction": 1.0},
        # The host of a CPU has no device to give back.
        RELEASE | {f"{ROLLOUT}.free_cache_engine": False, "trainer.device": "cpu"},
        {f"{ROLLOUT}.free_cache_engine": False, "trainer.device": "cuda"},
        {f"{MODEL}.lora_rank": 8, f"{ROLLOUT}.disaggregation.enabled": True},
        STANDALONE | {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": True},
        STANDALONE | {f"{MODEL}.lora_rank": 0, f"{ROLLOUT}.disaggregation.enabled": False},
        {"fuse.interstage.enabled": False, "fuse.interstage.migration_threshold": 4, "fuse.elastic.scale": True},
    ],
    ids=str,
)
def test_what_fits_is_not_refused(changes):
    assert refused(changes) == {}


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        (RELEASE | {f"{ROLLOUT}.free_cache_engine": False, "trainer.device": "cuda"}, f"{ROLLOUT}.free_cache_engine", "gives no device back"),
        (RELEASE | {f"{ROLLOUT}.disaggregation.enabled": True, "fuse.elastic.cut_fraction": 0.9}, f"{ROLLOUT}.disaggregation.enabled", "cut_fraction=0.9 needs false"),
        (STANDALONE | {f"{MODEL}.lora_rank": 8}, f"{MODEL}.lora_rank", f"{MODEL}.lora.merge=true"),
        (STANDALONE | {f"{MODEL}.lora.rank": 8}, f"{MODEL}.lora.rank", f"{MODEL}.lora.merge=true"),
        (STANDALONE | {f"{ROLLOUT}.disaggregation.enabled": True}, f"{ROLLOUT}.disaggregation.enabled", "servers of two kinds"),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_what_does_not_fit_is_refused_by_its_key(changes, key, said):
    found = refused(changes)
    assert found.keys() == {key}
    assert said in found[key]
