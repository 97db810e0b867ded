"""Imports flow one way, and only named modules import verl. Imports inside functions count too."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]
ROOTS = (REPO, REPO / "plugins", REPO / "patches")
PACKAGES = (
    "verl_fuse",
    "verl_fuse_patches",
    "verl_fuse_elastic",
    "verl_fuse_interstage",
    "verl_fuse_observe",
    "verl_fuse_pipeline",
    "verl_fuse_placement",
    "verl_fuse_realloc",
    "verl_fuse_speculation",
    "verl_fuse_update",
    "verl_fuse_cpu",
    "hydra_plugins",
)

# Lowest first. A module may import its own row and those above it in this list; the longest matching prefix decides.
LAYERS = (
    ("verl_fuse", "verl_fuse.errors", "verl_fuse.free_memory", "verl_fuse.extras"),
    ("verl_fuse.spec",),
    ("verl_fuse.policy",),
    ("verl_fuse.cost",),
    ("verl_fuse.schedule",),
    ("verl_fuse.timeline",),
    ("verl_fuse.compare",),
    ("verl_fuse.simulate",),
    ("verl_fuse.plan",),
    ("verl_fuse.tune",),
    ("verl_fuse.reshard",),
    ("verl_fuse.runtime",),
    ("verl_fuse.feature", "verl_fuse.advice"),
    ("verl_fuse.hookspecs", "verl_fuse.plugins"),
    ("verl_fuse.testing",),
    ("verl_fuse.host.names", "verl_fuse.host.switch", "verl_fuse.host.config"),
    ("verl_fuse.host.upstream",),
    ("verl_fuse.host.record",),
    ("verl_fuse.host.start",),
    ("verl_fuse.host.weights",),
    ("verl_fuse.host.sharing",),
    ("verl_fuse.host.inference",),
    ("verl_fuse.host.rollout",),
    ("verl_fuse.host",),
    ("verl_fuse_patches",),
    (
        "verl_fuse_elastic",
        "verl_fuse_interstage",
        "verl_fuse_observe",
        "verl_fuse_pipeline",
        "verl_fuse_placement",
        "verl_fuse_realloc",
        "verl_fuse_speculation",
        "verl_fuse_update",
        "verl_fuse_cpu",
        "hydra_plugins",
    ),
    ("verl_fuse.cli", "verl_fuse.__main__"),
)

HEAVY = frozenset(
    {"verl", "ray", "torch", "transfer_queue", "vllm", "megatron", "mbridge", "tensordict", "transformers"}
)
MAY_IMPORT_HEAVY = {
    "verl_fuse.host": HEAVY,
    "verl_fuse.runtime": {"torch"},
    "verl_fuse_cpu": HEAVY,
    "verl_fuse_patches": HEAVY,
    "verl_fuse_elastic.standalone": HEAVY,
    "verl_fuse_interstage.slices": HEAVY,
    **{f"verl_fuse_pipeline.{name}": HEAVY for name in ("fused", "joint", "megatron")},
    **{f"verl_fuse_placement.{name}": HEAVY for name in ("deferred", "resized")},
    "verl_fuse_realloc.sync": HEAVY,
    "verl_fuse_speculation.scheduler": {"vllm"},
    **{
        f"verl_fuse_update.{name}": HEAVY
        for name in ("balance", "critic", "lean", "parts", "shared", "short_pass", "stream")
    },
}
# Where Hydra, which comes with the extra `verl`, is imported outside the host side.
USES_HYDRA = ("hydra_plugins", "verl_fuse.cli.composition")
# Distributions that are imported under another name.
MODULE_OF = {"PyYAML": "yaml"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the distribution by dotted name."""
    found = {}
    for root in ROOTS:
        for path in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything the file imports at any depth; `from a import b` counts as
    a.b if that is a module."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in modules() else base


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def layer(module: str) -> tuple[int, str]:
    """(height, row entry) of a module of ours. Bare `verl_fuse` matches itself only."""
    matches = [
        (len(entry), height, entry)
        for height, row in enumerate(LAYERS)
        for entry in row
        if (module == entry if entry == "verl_fuse" else within(module, entry))
    ]
    if not matches:
        raise LookupError(f"{module} is in no layer")
    _, height, entry = max(matches)
    return height, entry


def upward_imports(module: str, path: Path) -> list[str]:
    """Imports of `module` that do not flow down."""
    height, entry = layer(module)
    wrong = []
    for line, imported in imports(path):
        if imported.split(".")[0] not in PACKAGES:
            continue
        above, other = layer(imported)
        if above > height or (above == height and other != entry and entry.startswith("verl_fuse_")):
            wrong.append(f"{path.relative_to(REPO)}:{line}: {module} imports {imported}")
    return wrong


def test_every_package_is_looked_at():
    assert {name.split(".")[0] for name in modules()} == set(PACKAGES)
    assert {"verl_fuse.spec.timeline", "verl_fuse.host.upstream.on_import", "verl_fuse.cli.main"} <= modules().keys()


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_flow_down(module: str):
    assert upward_imports(module, modules()[module]) == []


def test_no_module_imports_itself_through_others():
    graph = {
        module: {name for _, name in imports(path) if name in modules()} - {module}
        for module, path in modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("module", sorted(modules()))
def test_only_the_host_side_imports_verl(module: str):
    allowed = next((names for package, names in MAY_IMPORT_HEAVY.items() if within(module, package)), frozenset())
    used = {imported.split(".")[0] for _, imported in imports(modules()[module])}
    assert used & HEAVY <= allowed


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_are_absolute(module: str):
    relative = [
        node.lineno for node in ast.walk(tree(modules()[module])) if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []


@pytest.mark.parametrize(
    "module", sorted(name for name in modules() if not any(within(name, package) for package in MAY_IMPORT_HEAVY))
)
def test_light_modules_use_declared_dependencies_only(module: str):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["plot"]]
    distributions = {MODULE_OF.get(name := Requirement(line).name, name) for line in declared}
    allowed = {*sys.stdlib_module_names, *PACKAGES, *distributions, "verl_fuse_recipes"}
    if any(within(module, package) for package in USES_HYDRA):
        allowed.add("hydra")
    if within(module, "verl_fuse.schedule"):
        # What runs without it: tests/unit/schedule/test_cli.py.
        allowed |= {Requirement(line).name for line in project["optional-dependencies"]["solver"]}
    assert {imported.split(".")[0] for _, imported in imports(modules()[module])} <= allowed


def test_no_two_test_files_have_the_same_name():
    """pytest imports them by their file names alone, and refuses the second one when all are collected."""
    files: dict[str, list[str]] = {}
    for file in (REPO / "tests").rglob("*.py"):
        if file.name not in ("__init__.py", "conftest.py"):
            files.setdefault(file.name, []).append(str(file.relative_to(REPO)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
