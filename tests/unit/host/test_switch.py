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


@pytest.mark.parametrize(
    ("variables", "address", "why"),
    [
        ({HOOK: "acme.ray.hook"}, None, "RAY_RUNTIME_ENV_HOOK=acme.ray.hook is set"),
        ({"UV": "/usr/bin/uv"}, None, "Ray does not read RAY_RUNTIME_ENV_HOOK under uv run"),
        ({}, "ray://head:10001", "Ray's client does not read RAY_RUNTIME_ENV_HOOK"),
        ({"RAY_ADDRESS": "ray://head:10001"}, None, "Ray's client does not read RAY_RUNTIME_ENV_HOOK"),
        ({}, "head:6379", None),
        ({}, None, None),
    ],
)
def test_where_ray_asks_no_hook_the_user_is_told_what_to_add(monkeypatch, variables, address, why):
    for name in (HOOK, "UV", "RAY_ADDRESS"):
        # Set first, so that what the function sets is taken back after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = reach_workers(address)
    assert os.environ[HOOK] == variables.get(HOOK, "verl_fuse.host.switch.with_variable")
    if why is None:
        assert said is None
    else:
        assert said is not None
        assert f"because {why}: " in said
        assert said.endswith("+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FUSE=off")
