"""Refuses trainers and devices that verl-fuse does not reach, where a run asks for verl-fuse.

Invariant (tests/unit/host/test_out_of_reach.py): a run of stock verl, without a block `fuse` and in a trainer mode of
verl, is not refused.
"""

from collections.abc import Iterator

from omegaconf import DictConfig

from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.spec.composed import getter, is_legacy
from verl_fuse.spec.step import Refusal


def out_of_reach(config: DictConfig) -> Iterator[Refusal]:
    """Refuse verl's trainer before V1, which knows no trainer mode, and NPUs, for which nothing of verl-fuse is
    written."""
    get = getter(config)
    if is_legacy(config) and ("fuse" in config or get("trainer.v1.trainer_mode") == TRAINER_MODE):
        allowed = "verl-fuse needs verl's V1 trainer: true, or neither a block fuse nor trainer.v1.trainer_mode=fuse"
        yield Refusal("trainer.use_v1", get("trainer.use_v1"), allowed)
    if get("trainer.device") == "npu" and get("trainer.v1.trainer_mode") == TRAINER_MODE:
        yield Refusal(
            "trainer.device", "npu", "trainer.v1.trainer_mode=fuse needs cuda or cpu; trainer_mode=sync is stock verl"
        )
