"""Values read of a composed configuration, and refusals of it."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.spec.composed import (
    copied,
    getter,
    has_critic,
    has_reference,
    off_beside,
    on_accelerators,
    required,
    required_if_set,
)
from verl_fuse.spec.step import Refusal

NEEDS = {"mode": ("fuse", "fuse"), "part.size": (1, "one")}


def test_a_key_that_is_not_there_is_read_as_none_and_nothing_is_written():
    config = OmegaConf.create({"part": {"size": 2, "missing": "???"}})
    before = config.copy()
    assert [getter(config)(key) for key in ("part.size", "part.none", "none.at.all", "part.missing")] == [
        2,
        None,
        None,
        None,
    ]
    assert config == before


@pytest.mark.parametrize("value", [2, lambda: None])
def test_a_copy_is_whole_and_its_own(value):
    """Whatever a program has put into it, with references and flags as they are."""
    flags = {"allow_objects": True}
    config = OmegaConf.create({"part": {"size": "${other}", "value": value}, "other": 3}, flags=flags)
    OmegaConf.set_struct(config, True)
    found = copied(config)
    assert found == config
    assert found.part.value is value
    found.other = 4
    assert (found.part.size, config.part.size) == (4, 3)
    assert OmegaConf.is_struct(found)
    assert OmegaConf.is_interpolation(found.part, "size")


def test_what_is_required_must_be_there():
    assert list(required({"part.size": 1}.get, NEEDS)) == [Refusal("mode", None, "fuse")]
    assert list(required({"mode": "fuse", "part.size": 1}.get, NEEDS)) == []


@pytest.mark.parametrize("unset", [{}, {"mode": None, "part.size": 0}, {"mode": "", "part.size": False}])
def test_what_is_unset_may_stay_so(unset: dict):
    assert list(required_if_set(unset.get, NEEDS)) == []
    assert list(required_if_set((unset | {"part.size": 3}).get, NEEDS)) == [Refusal("part.size", 3, "one")]


def test_what_must_be_off_beside_a_feature_is_said_as_yaml_writes_it():
    off = {"a": False, "b": None, "c": "disabled", "d": 1}
    assert list(off_beside({"a": 0, "b": "", "d": 1}.get, "x=true", off)) == []
    assert list(map(str, off_beside({"a": True, "b": "t", "c": "R2", "d": 2}.get, "x=true", off))) == [
        "a=true: x=true needs false",
        "b='t': x=true needs null",
        "c='R2': x=true needs disabled",
        "d=2: x=true needs 1",
    ]


def test_devices_are_accelerators_unless_they_are_the_host():
    assert [on_accelerators({"trainer.device": name}.get) for name in ("cuda", "npu", "cpu")] == [True, True, False]


@pytest.mark.parametrize(
    ("enable", "estimator", "has"),
    [(None, "gae", True), (None, "grpo", False), (True, "grpo", True), (False, "gae", False)],
)
def test_a_critic_is_trained_where_it_is_enabled_or_else_with_gae(enable: bool | None, estimator: str, has: bool):
    assert has_critic({"critic.enable": enable, "algorithm.adv_estimator": estimator}.get) is has


def test_a_reference_is_there_for_a_kl_penalty():
    assert not has_reference({}.get)
    assert has_reference({"algorithm.use_kl_in_reward": True}.get)
    assert has_reference({"actor_rollout_ref.actor.use_kl_loss": True}.get)
