"""The plugin manager: what it accepts, what it refuses, and with which words."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.spec.timeline import Timeline

Install = Callable[..., None]

HEADER = "from verl_fuse.hookspecs import hookimpl\nHOOK_API = 2\n"
TIMELINE = Timeline("run", 1, 0.0, 1.0, ())


@pytest.fixture
def no_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the built-in plugins, so that only the plugin under test answers."""
    monkeypatch.setattr(plugins, "BUILTIN", {})


def test_importing_the_manager_loads_no_plugin():
    code = "import sys, verl_fuse.plugins; print(sorted(m for m in sys.modules if m.startswith('verl_fuse_')))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"


def test_builtin_plugins_load_and_are_named_after_their_config_block():
    manager = plugins.load()
    assert [name for name, _ in manager.list_name_plugin()][: len(plugins.BUILTIN)] == [
        "interstage",
        "elastic",
        "pipeline",
        "placement",
        "realloc",
        "speculation",
        "update",
        "observe",
        "cpu",
    ]
    assert set(plugins.config_blocks(manager)) <= {source.name for source in plugins.discover()}


def test_a_disabled_plugin_is_not_imported(no_builtins: None, installed_plugin: Install):
    installed_plugin("acme", "raise RuntimeError('imported')")
    manager = plugins.load(disabled=["acme"])
    assert manager.list_name_plugin() == []


def test_disabling_an_unknown_plugin_lists_the_known_ones():
    with pytest.raises(
        FuseError,
        match=r"cannot disable unknown plugin interstge; installed: interstage, elastic, pipeline, placement, realloc, "
        r"speculation, update, observe, cpu",
    ):
        plugins.load(disabled=["interstge"])


def test_a_module_plugin_is_called(no_builtins: None, installed_plugin: Install):
    installed_plugin("acme", HEADER + "@hookimpl\ndef fuse_metrics(timeline): return {'acme/step': timeline.step}")
    assert plugins.load().hook.fuse_metrics(timeline=TIMELINE) == [{"acme/step": 1}]


def test_an_instance_plugin_is_called(no_builtins: None, installed_plugin: Install):
    source = HEADER + (
        "class Acme:\n    HOOK_API = 2\n    @hookimpl\n    def fuse_metrics(self, timeline): return {'acme/step': 2}\n"
        "acme = Acme()"
    )
    installed_plugin("acme", source, value="acme_fuse_acme:acme")
    assert plugins.load().hook.fuse_metrics(timeline=TIMELINE) == [{"acme/step": 2}]


CLASS = HEADER + (
    "class Acme:\n    HOOK_API = 2\n    def __init__(self{}): self.asked = 0\n"
    "    @hookimpl\n    def fuse_metrics(self, timeline):\n        self.asked += 1\n"
    "        return {{'acme/asked': self.asked}}"
)


def test_a_class_becomes_an_instance_whenever_plugins_are_loaded(no_builtins: None, installed_plugin: Install):
    installed_plugin("acme", CLASS.format(""), value="acme_fuse_acme:Acme")
    hook, other = plugins.load().hook, plugins.load().hook
    assert hook.fuse_metrics(timeline=TIMELINE) == [{"acme/asked": 1}]
    assert hook.fuse_metrics(timeline=TIMELINE) == [{"acme/asked": 2}]
    assert other.fuse_metrics(timeline=TIMELINE) == [{"acme/asked": 1}]


def test_a_class_that_needs_arguments_is_refused_by_name(no_builtins: None, installed_plugin: Install):
    installed_plugin("acme", CLASS.format(", size"), value="acme_fuse_acme:Acme")
    with pytest.raises(FuseError, match=r"plugin 'acme' .*failed to load: TypeError: .*size"):
        plugins.load()


def test_the_last_registered_policy_is_asked_first(no_builtins: None, installed_plugin: Install):
    policy = HEADER + "@hookimpl\ndef fuse_infer_next(view, lane): return ['{}']"
    installed_plugin("alpha", policy.format("alpha"), distribution="alpha-fuse")
    installed_plugin("beta", policy.format("beta"), distribution="beta-fuse")
    assert plugins.load().hook.fuse_infer_next(view=None, lane=None) == ["beta"]


def test_config_blocks_are_keyed_by_plugin_name(no_builtins: None, installed_plugin: Install):
    source = HEADER + (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Acme:\n    share: float = 0.5\n"
        "@hookimpl\ndef fuse_config(): return Acme"
    )
    installed_plugin("acme", source)
    blocks = plugins.config_blocks(plugins.load())
    assert {name: block() for name, block in blocks.items()}["acme"].share == 0.5


@pytest.mark.parametrize(
    "block",
    ["None", "dict", "Acme()", "dataclass(type('Thawed', (), {}))"],
    ids=["none", "plain", "instance", "thawed"],
)
def test_a_config_block_that_is_no_frozen_dataclass_is_refused(
    no_builtins: None, installed_plugin: Install, block: str
):
    source = HEADER + (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Acme: pass\n"
        f"@hookimpl(specname='fuse_config')\ndef block(): return {block}"
    )
    installed_plugin("acme", source)
    with pytest.raises(FuseError, match=r"plugin 'acme': fuse_config returned .*; expected a frozen dataclass"):
        plugins.config_blocks(plugins.load())


def test_a_config_field_without_a_default_is_refused(no_builtins: None, installed_plugin: Install):
    source = HEADER + (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Acme:\n    share: float\n"
        "@hookimpl\ndef fuse_config(): return Acme"
    )
    installed_plugin("acme", source)
    with pytest.raises(FuseError, match=r"plugin 'acme': fields of Acme without a default: share"):
        plugins.config_blocks(plugins.load())


REFUSED = {
    "raises at load": (
        "raise ValueError('no licence')",
        r"plugin 'acme' \(from acme-fuse, acme_fuse_acme\) failed to load: ValueError: no licence",
    ),
    "missing import": ("import nosuchmodule", r"failed to load: ModuleNotFoundError: No module named 'nosuchmodule'"),
    "syntax error": ("def", r"failed to load: SyntaxError"),
    "no hook version": ("", r"declares HOOK_API=None; verl-fuse .* offers 2:"),
    "newer hook version": ("HOOK_API = 3", r"plugin 'acme' .* declares HOOK_API=3; verl-fuse .* offers 2: install"),
    "older hook version": (
        "HOOK_API = 1",
        (
            r"declares HOOK_API=1; verl-fuse .* offers 2 .since 1 events are classes of verl_fuse.spec.events, and "
            r"fuse_setup gets a "
            r'verl_fuse.hookspecs.Trainer; see "From HOOK_API 1 to 2" in plugins/README.md.: install'
        ),
    ),
    "unknown hook": (
        HEADER + "@hookimpl\ndef fuse_metrcs(timeline): pass",
        r"plugin 'acme' .*: there is no hook fuse_metrcs; did you mean fuse_metrics\?",
    ),
    "unknown hook, nothing close": (
        HEADER + "@hookimpl\ndef zzz(): pass",
        r"there is no hook zzz; hooks: fuse_assign, fuse_config, fuse_contracts, fuse_devices, fuse_event",
    ),
    "hook without its marker": (
        HEADER + "def fuse_metrics(timeline): pass",
        r"plugin 'acme' .*: fuse_metrics is not marked with @hookimpl$",
    ),
    "misspelt and without its marker": (
        HEADER + "def fuse_metric(timeline): pass",
        r"plugin 'acme' .*: fuse_metric is not marked with @hookimpl; did you mean fuse_metrics\?",
    ),
    "wrong argument": (
        HEADER + "@hookimpl\ndef fuse_metrics(timelines): pass",
        r"plugin 'acme' .*: fuse_metrics has no argument timelines \(did you mean 'timeline'\?\); it takes timeline$",
    ),
}


@pytest.mark.parametrize(("source", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_plugin_that_cannot_be_used_is_refused_by_name(
    no_builtins: None, installed_plugin: Install, source: str, message: str
):
    installed_plugin("acme", source)
    with pytest.raises(FuseError, match=rf"(?s){message}"):
        plugins.load()


def test_the_original_error_is_chained(no_builtins: None, installed_plugin: Install):
    installed_plugin("acme", "raise ValueError('no licence')")
    with pytest.raises(FuseError) as caught:
        plugins.load()
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_optional_hook_of_another_version_is_ignored(no_builtins: None, installed_plugin: Install):
    installed_plugin("acme", HEADER + "@hookimpl(optionalhook=True)\ndef fuse_from_the_future(): pass")
    assert [name for name, _ in plugins.load().list_name_plugin()] == ["acme"]


def test_two_plugins_of_one_name_are_refused_with_both_distributions(no_builtins: None, installed_plugin: Install):
    installed_plugin("acme", HEADER, distribution="acme-one")
    installed_plugin("acme", HEADER, distribution="acme-two")
    with pytest.raises(FuseError, match=r"two plugins are named 'acme': .*from acme-one.* and .*from acme-two"):
        plugins.discover()


def test_a_stranger_cannot_take_the_name_of_a_builtin(installed_plugin: Install):
    installed_plugin("interstage", HEADER)
    with pytest.raises(FuseError, match=r"two plugins are named 'interstage': .*from verl-fuse.* and .*from acme-fuse"):
        plugins.discover()


def test_one_object_under_two_names_is_refused(no_builtins: None, installed_plugin: Install):
    installed_plugin("acme", HEADER)
    installed_plugin("twin", "", distribution="twin-fuse", value="acme_fuse_acme")
    with pytest.raises(FuseError, match=r"plugin 'twin' .*already registered"):
        plugins.load()


@pytest.mark.parametrize("name", ["Acme", "acme-plugin", "2fast"])
def test_a_name_that_cannot_be_a_config_key_is_refused(no_builtins: None, installed_plugin: Install, name: str):
    installed_plugin(name, HEADER)
    with pytest.raises(FuseError, match=rf"plugin '{name}' .*the name becomes the key"):
        plugins.discover()
