"""The site of `make docs`: links are checked, folders lead to their README, files are copied; mkdocs builds it all."""

import re
from pathlib import Path

import pytest

from ci.docs.site import RECORDED, build, gather, tracked_pages
from verl_fuse.errors import FuseError

POLICY = RECORDED.parent / "pages/policy.md"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "repo/part").mkdir(parents=True)
    (tmp_path / "repo/part/README.md").write_text("# Part\n")
    (tmp_path / "repo/part/code.py").write_text("x = 1\n")
    return tmp_path / "repo"


def test_a_folder_leads_to_its_readme_and_a_file_to_a_copy(small: Path, tmp_path: Path):
    (small / "README.md").write_text("[a](part) [b](part/code.py) [c](part/README.md#x) [d](https://e.f/g)\n")
    gather(small, [Path("README.md"), Path("part/README.md")], tmp_path / "site")
    assert (tmp_path / "site/README.md").read_text() == (
        "[a](part/README.md) [b](part/code.py) [c](part/README.md#x) [d](https://e.f/g)\n"
    )
    assert (tmp_path / "site/part/code.py").read_text() == "x = 1\n"


def test_links_that_lead_nowhere_are_named(small: Path, tmp_path: Path):
    (small / "README.md").write_text("[a](gone.md) [b](part/none.py)\n")
    with pytest.raises(FuseError) as refused:
        gather(small, [Path("README.md")], tmp_path / "site")
    assert [str(each) for each in refused.value.args] == [
        "link that leads nowhere: README.md: gone.md",
        "link that leads nowhere: README.md: part/none.py",
    ]


def test_the_site_builds_without_a_dead_link(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="needs mkdocs (pip install 'verl-fuse[dev]')")
    site = tmp_path / "site"
    build(site)
    assert len(list(site.rglob("*.html"))) >= len(tracked_pages())
    shown = (site / "examples.html").read_text()
    for name in ("grpo-fast/timeline/step_000016", "grpo-observe/timeline", "comparison", "strategies/strategies"):
        assert f'href="examples/{name}.html"' in shown
        page = (site / f"examples/{name}.html").read_text()
        # No path of the machine that built it.
        assert str(tmp_path) not in page
        assert len(page) < 50_000
    assert "verl-fuse advise grpo-fast" in (site / "examples/grpo-fast/timeline/step_000016.html").read_text()
    assert (site / "reference/verl_fuse.hookspecs.html").is_file()


def test_what_is_recorded_is_small():
    recorded = [path.stat().st_size for path in RECORDED.rglob("*") if path.is_file()]
    assert sum(recorded) < 200_000


def test_the_policy_of_the_quickstart_passes_its_own_test():
    blocks = re.findall(r"^```python\n(.*?)^```$", POLICY.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    exec("".join(blocks), {})


@pytest.mark.parametrize("page", ["script.md", "policy.md"])
def test_a_quickstart_is_one_screen(page: str):
    assert len(POLICY.with_name(page).read_text().splitlines()) <= 65
