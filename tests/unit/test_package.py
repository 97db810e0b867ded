"""The package's metadata: the invariants in ci/metadata.py, the packages that an install brings, and what is typed."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci.metadata import repository
from verl_fuse import __version__

REPO = Path(__file__).resolve().parents[2]
ADDRESS = "https://forge.example/someone/verl-fuse"
MARKDOWN = re.compile(r"\]\(([^)\s]+)\)")


def metadata(**environment: str) -> dict:
    """Return the metadata that a build in this environment has."""
    clean = {name: value for name, value in os.environ.items() if name != "VERL_FUSE_REPOSITORY"}
    command = [sys.executable, "-m", "hatchling", "metadata"]
    shown = subprocess.run(command, cwd=REPO, env=clean | environment, check=True, stdout=subprocess.PIPE)
    return json.loads(shown.stdout)


def test_without_a_repository_no_address_is_named_and_no_link_is_dead():
    built = metadata()
    assert not built.get("urls")
    text = built["readme"]["text"]
    assert text.startswith("# verl-fuse\n")
    assert [link for link in MARKDOWN.findall(text) if not link.startswith(("https://", "#"))] == []
    assert "![" not in text
    assert len(text) > 0.6 * len((REPO / "README.md").read_text())


def test_with_a_repository_every_address_is_in_it():
    built = metadata(VERL_FUSE_REPOSITORY=f"{ADDRESS}/")
    files = f"{ADDRESS}/blob/v{__version__}"
    assert built["urls"] == {
        "Source": ADDRESS,
        "Documentation": f"{files}/verl_fuse/README.md",
        "Issues": f"{ADDRESS}/issues",
        "Security": f"{files}/SECURITY.md",
        "Changes": f"{files}/CHANGELOG.md",
    }
    links = MARKDOWN.findall(built["readme"]["text"])
    of_files = [link for link in MARKDOWN.findall((REPO / "README.md").read_text()) if "://" not in link]
    assert len(of_files) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert sum(link.startswith(f"{ADDRESS}/") for link in links) == len(of_files)
    for link in [*links, *built["urls"].values()]:
        if match := re.match(rf"{ADDRESS}/(?:blob|tree|raw)/v{__version__}/([^#]+)", link):
            assert (REPO / match[1]).exists(), link
    assert f"]({ADDRESS}/raw/v{__version__}/ci/docs/steps.svg)" in built["readme"]["text"]


def test_authors_and_licence_are_those_of_the_citation():
    built, cited = metadata(), yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert built["authors"] == cited["authors"]
    assert built["license"] == cited["license"]


@pytest.mark.parametrize(
    "given",
    [
        "forge.example/x/y",
        "http://forge.example/x/y",
        "https://forge.example",
        "https://forge.example//",
        "https://forge.example/x",
        "https://user:token@forge.example/x/y",
        "https://forge.example/x/y.git",
        "https://forge.example/x/y?z=1",
        "https://forge.example/x/y#z",
        "https://forge.example/x/y)",
    ],
)
def test_an_address_that_is_none_is_refused(given: str):
    with pytest.raises(
        ValueError, match=rf"VERL_FUSE_REPOSITORY='{re.escape(given)}': needs the address .*https://HOST/OWNER/NAME"
    ):
        repository({"VERL_FUSE_REPOSITORY": given})


def project() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def brought(requirements: list[str]) -> dict[str, str]:
    """Return all packages that these requirements bring, with versions, by the metadata of what is installed."""
    found, todo = dict[str, str](), [Requirement(line) for line in requirements]
    while todo:
        wanted = todo.pop()
        package = distribution(wanted.name)
        found[canonicalize_name(wanted.name)] = package.version
        for needed in map(Requirement, package.requires or ()):
            applies = needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in {"", *wanted.extras}
            )
            if applies and (needed.extras or canonicalize_name(needed.name) not in found):
                todo.append(needed)
    return found


def test_the_guide_tells_what_an_install_brings():
    """By installed metadata, which need no network; tests/integration/test_wheel.py installs it."""
    text = (REPO / "verl_fuse/README.md").read_text()
    section = " ".join(text[text.index("## What an install changes") :].split("\n## ")[0].split())
    packages, (own,) = brought(project()["dependencies"]), re.findall(r"brings (\d+) packages", section)
    assert int(own) == len(packages)
    listed = set(re.findall(r"`([\w-]+)`", re.findall(r"These are (.*?)\. Neither", section, re.DOTALL)[0]))
    assert listed == set(packages)
    assert "numpy" in listed
    assert not {"ortools", "protobuf", "pandas"} & listed
    beside = brought(project()["optional-dependencies"]["verl"])
    new = re.findall(r"`([\w-]+)`", re.findall(r"Beside verl (.*?) are new", section, re.DOTALL)[0])
    assert set(new) == set(packages) - set(beside)


def test_bounds_of_ortools_are_told():
    needs = {needed.name: needed.specifier for needed in map(Requirement, distribution("ortools").requires or ())}
    assert "ortools" in brought(project()["optional-dependencies"]["solver"])
    text = " ".join((REPO / "verl_fuse/README.md").read_text().split())
    bounds = {name: sorted(map(str, needs[name]), reverse=True) for name in ("numpy", "protobuf")}
    for name, said in bounds.items():
        assert f"`{name}{','.join(said)}`" in text


def test_every_package_of_ours_is_typed():
    folders = [REPO / "verl_fuse", *sorted((REPO / "plugins").glob("verl_fuse_*")), REPO / "patches/verl_fuse_patches"]
    assert len(folders) == 11
    assert [folder.name for folder in folders if not (folder / "py.typed").is_file()] == []
