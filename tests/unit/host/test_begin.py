"""A trainer makes all checks before it builds anything, each on what the one before left."""

from types import SimpleNamespace

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.host.start import begin


@pytest.fixture
def made(monkeypatch):
    """The checks that were made, in order; each is a record of its call."""
    calls = []

    def recorded(name, answer=None):
        monkeypatch.setattr(begin, name, lambda *args: calls.append((name, *args)) or answer)

    settings = SimpleNamespace(manager="manager", overrides={"a": 1})
    recorded("require_version")
    recorded("load_settings", settings)
    recorded("join_verl_log")
    recorded("apply_plan", ["a is 1, by the plan"])
    recorded("set_by_plugins", SimpleNamespace(manager="manager", chosen=True))
    recorded("require_contracts", ["a verdict"])
    recorded("warn_of_changes")
    return calls, settings


def test_every_check_is_made_and_the_contracts_are_those_of_the_changed_configuration(made, caplog):
    calls, settings = made
    assert begin.checked_settings("config").chosen
    assert calls == [
        ("require_version",),
        ("load_settings", "config"),
        ("join_verl_log", "manager"),
        ("apply_plan", "config", {"a": 1}),
        ("set_by_plugins", "config", settings),
        ("require_contracts", "manager", "config"),
        ("warn_of_changes", ["a verdict"]),
    ]
    assert caplog.messages == ["a is 1, by the plan"]


def test_a_version_that_does_not_fit_ends_it_before_anything_is_read(made, monkeypatch):
    calls, _ = made

    def refuse():
        raise FuseError("verl 0.8 is installed")

    monkeypatch.setattr(begin, "require_version", refuse)
    with pytest.raises(FuseError, match=r"verl 0\.8"):
        begin.checked_settings("config")
    assert calls == []
