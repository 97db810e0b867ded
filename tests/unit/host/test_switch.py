"""VERL_FUSE=off is read from the environment, and handed to Ray's workers."""

import os

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.host.switch import reach_workers, require_on, switched_off, with_variable

HOOK = "RAY_RUNTIME_ENV_HOOK"


@pytest.mark.parametrize(("value", "off"), [(None, False), ("on", False), ("off", True)])
def test_the_switch_is_on_unless_it_is_off(monkeypatch, value, off):
    monkeypatch.delenv("VERL_FUSE", raising=False)
    if value is not None:
        monkeypatch.setenv("VERL_FUSE", value)
    assert switched_off() is off
    if not off:
        require_on("both runs would be stock verl")
        return
    with pytest.raises(FuseError) as refused:
        require_on("both runs would be stock verl")
    expected = "VERL_FUSE=off in the environment: both runs would be stock verl; unset it, or set it to on"
    assert str(refused.value) == expected


@pytest.mark.parametrize("value", ["", "0", "OFF", "false"])
def test_a_value_that_says_neither_is_refused(monkeypatch, value):
    monkeypatch.setenv("VERL_FUSE", value)
    with pytest.raises(FuseError, match=f"VERL_FUSE='{value}' in the environment: needs on or off; unset, it is on"):
        switched_off()


@pytest.mark.parametrize("given", [None, {}, {"env_vars": None, "pip": ["acme"]}, {"env_vars": {"A": "1"}}])
def test_workers_get_the_variable_beside_what_they_had(monkeypatch, given):
    monkeypatch.setenv("VERL_FUSE", "off")
    found = with_variable(given)
    had = (given or {}).get("env_vars") or {}
    assert found == {**(given or {}), "env_vars": {**had, "VERL_FUSE": "off"}}


def test_a_hook_of_the_user_stays_and_is_named(monkeypatch):
    monkeypatch.setenv(HOOK, "acme.ray.hook")
    said = reach_workers()
    assert said is not None
    assert "RAY_RUNTIME_ENV_HOOK=acme.ray.hook is set" in said
    assert "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FUSE=off" in said
    assert os.environ[HOOK] == "acme.ray.hook"
    monkeypatch.delenv(HOOK)
    # Undone after the test, although the function sets it.
    monkeypatch.setenv(HOOK, "verl_fuse.host.switch.with_variable")
    assert reach_workers() is None
