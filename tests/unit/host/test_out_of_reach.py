"""Trainers and devices on which nothing of verl-fuse exists, where a run asks for it."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.out_of_reach import out_of_reach
from verl_fuse.host.start.settings import load_settings


def configuration(*, fuse: bool, mode: str, **trainer):
    block = {"fuse": {}} if fuse else {}
    return OmegaConf.create(
        {"trainer": {"v1": {"trainer_mode": mode}, "device": "cuda", "use_v1": True, **trainer}, **block}
    )


def keys(**arguments) -> list[str]:
    return [f"{refusal.key}={refusal.value}" for refusal in out_of_reach(configuration(**arguments))]


@pytest.mark.parametrize("use_v1", [False, None, 0])
@pytest.mark.parametrize(("fuse", "mode"), [(True, "fuse"), (True, "sync"), (False, "fuse")])
def test_the_trainer_before_v1_is_refused_where_the_run_asks_for_verl_fuse(fuse, mode, use_v1):
    assert keys(fuse=fuse, mode=mode, use_v1=use_v1) == [f"trainer.use_v1={use_v1}"]


def test_npus_are_refused_in_mode_fuse():
    assert keys(fuse=True, mode="fuse", device="npu") == ["trainer.device=npu"]


@pytest.mark.parametrize(
    "stock",
    [
        {"fuse": False, "mode": "sync", "use_v1": False},
        {"fuse": False, "mode": "sync", "device": "npu"},
        {"fuse": True, "mode": "sync", "device": "npu"},
        {"fuse": True, "mode": "fuse", "device": "cpu"},
        {"fuse": True, "mode": "fuse"},
    ],
)
def test_everything_else_is_left_to_verl(stock):
    assert keys(**stock) == []


def test_both_are_refused_with_what_is_allowed():
    with pytest.raises(FuseError) as error:
        load_settings(configuration(fuse=True, mode="fuse", device="npu", use_v1=False))
    assert error.value.args == (
        "trainer.use_v1=false: verl-fuse needs verl's V1 trainer: true, or neither a block fuse nor "
        "trainer.v1.trainer_mode=fuse",
        "trainer.device='npu': trainer.v1.trainer_mode=fuse needs cuda or cpu; trainer_mode=sync is stock verl",
    )
