"""The check notices what matters, in the right class, and nothing else: verl's source is changed in
many ways, one at a time."""

import ast
import functools
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from upstream_mutations import Mutation, irrelevant, relevant

from verl_fuse import plugins
from verl_fuse.host.start.compat import fingerprint
from verl_fuse.host.start.compat.judge import Level
from verl_fuse.host.start.compat.seams import PACKAGES, Seam, host_seams, judge_all, plugin_seams
from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse.host.upstream.versions import installed
from verl_fuse.spec.contract import label

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES) or installed("verl") != "0.9.1",
    reason="mutates the installed verl 0.9.1",
)

# What did not change is parsed and put into its canonical form once for all mutations.
parse = functools.cache(ast.parse)
canonical = functools.cache(fingerprint.canonical)


@pytest.fixture(scope="module", autouse=True)
def cached() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "canonical", canonical)
        yield
    parse.cache_clear()
    canonical.cache_clear()


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The installed packages, verl being a copy that may be written to."""
    found = SourceTree.installed(*PACKAGES).roots
    copy = tmp_path_factory.mktemp("upstream") / "verl"
    shutil.copytree(found["verl"], copy, ignore=shutil.ignore_patterns("__pycache__"))
    return {**found, "verl": copy}


@pytest.fixture(scope="module")
def seams() -> list[Seam]:
    return [*host_seams(), *plugin_seams(plugins.load(), None)]


def reported(mutation: Mutation, roots: dict[str, Path], seams: list[Seam]) -> dict[str, Level]:
    """Label -> class of everything that is not green once the mutation is in place."""
    before = mutation.file.read_text()
    # Source that does not parse would be reported for the wrong reason.
    assert yaml.safe_load(mutation.text) if mutation.file.suffix == ".yaml" else ast.parse(mutation.text)
    mutation.file.write_text(mutation.text)
    try:
        verdicts = judge_all(seams, SourceTree(roots, parse))
    finally:
        mutation.file.write_text(before)
    found: dict[str, Level] = {}
    for verdict in verdicts:
        if verdict.level:
            name = label(verdict.seam.contract)
            found[name] = max(verdict.level, found.get(name, Level.GREEN))
    return found


def test_every_relevant_mutation_is_reported_in_its_class(roots, seams):
    mutations = relevant(SourceTree(roots, parse), [seam.contract for seam in seams])
    missed = {}
    for mutation in mutations:
        found = reported(mutation, roots, seams)
        if found.get(mutation.hits) is not mutation.level:
            missed[mutation.name] = found
    assert missed == {}
    assert len(mutations) >= 40


def test_no_irrelevant_mutation_is_reported(roots, seams):
    mutations = irrelevant(SourceTree(roots, parse), [seam.contract for seam in seams])
    noticed = {mutation.name: found for mutation in mutations if (found := reported(mutation, roots, seams))}
    assert noticed == {}
    assert len(mutations) >= 40
