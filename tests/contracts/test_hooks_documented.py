"""A hook is documented, described in one docstring, used by a built-in plugin and called by a
test; otherwise it goes."""

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pluggy
import pytest

from verl_fuse import hookspecs, plugins

HOOKS: dict[str, Callable[..., object]] = {
    name: function
    for name, function in vars(hookspecs).items()
    if pluggy.PluginManager("verl_fuse").parse_hookspec_opts(hookspecs, name) is not None
}


@pytest.fixture(scope="module")
def builtin() -> pluggy.PluginManager:
    """The manager with the built-in plugins only."""
    strangers = [source.name for source in plugins.discover() if source.name not in plugins.BUILTIN]
    return plugins.load(disabled=strangers)


@cache
def methods_called_in_tests(tests: Path) -> frozenset[str]:
    """Names called as methods (`manager.hook.x(...)`, `plugin.x(...)`) anywhere in the tests."""
    trees = (ast.parse(path.read_text()) for path in tests.rglob("test_*.py"))
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return frozenset(called.attr for called in calls if isinstance(called, ast.Attribute))


def test_the_contract_has_hooks():
    assert {"fuse_config", "fuse_infer_next", "fuse_metrics"} <= HOOKS.keys()


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_documented_with_its_arguments(name: str, repo: Path):
    arguments = ", ".join(inspect.signature(HOOKS[name]).parameters)
    assert f"### `{name}({arguments})`\n" in (repo / "plugins/README.md").read_text()


def test_only_hooks_that_exist_are_documented(repo: Path):
    documented = re.findall(r"^### `(\w+)\(", (repo / "plugins/README.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_first_result_hooks_say_so(name: str, repo: Path):
    options = pluggy.PluginManager("verl_fuse").parse_hookspec_opts(hookspecs, name)
    section = (repo / "plugins/README.md").read_text().split(f"### `{name}(")[1].split("\n#")[0]
    assert options is not None
    assert ("*First.*" in section) == bool(options["firstresult"])


@pytest.mark.parametrize("name", HOOKS)
def test_hook_has_a_docstring_and_annotations(name: str):
    signature = inspect.signature(HOOKS[name])
    assert (HOOKS[name].__doc__ or "").strip().endswith(".")
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values())


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_implemented_by_a_builtin_plugin(name: str, builtin: pluggy.PluginManager):
    assert [impl.plugin_name for impl in getattr(builtin.hook, name).get_hookimpls()]


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_called_by_a_test(name: str, repo: Path):
    assert name in methods_called_in_tests(repo / "tests")
