"""The READMEs of the recipes of GPUs have what `verl-fuse check` prints for them."""

import pytest

from ci.docs.recipes import HEADING, OF_GPUS, RECIPES, pages, with_choices
from verl_fuse.errors import FuseError

pytest.importorskip("verl")


def test_every_recipe_of_gpus_has_what_fast_chooses():
    found = dict(pages())
    assert {page.parent.name for page in found} == {folder.name for folder in RECIPES.glob(OF_GPUS)}
    assert len(found) >= 5
    assert [page.parent.name for page, text in found.items() if page.read_text() != text] == []
    assert all("fuse.preset=fast switches on: " in text for text in found.values())


def test_what_stands_below_the_heading_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "mine/README.md"
    page.parent.mkdir()
    page.write_text(f"# Mine\n\n{HEADING}```text\nold\n```\n\n## Run\n\n```sh\nrun\n```\n")
    once = with_choices(page, "new\n")
    command = "$ verl-fuse check --script recipes/mine/config.yaml"
    assert once == f"# Mine\n\n{HEADING}```text\n{command}\nnew\n```\n\n## Run\n\n```sh\nrun\n```\n"
    page.write_text(once)
    assert with_choices(page, "new\n") == once
    page.write_text("# Mine\n")
    with pytest.raises(FuseError, match="needs the heading '## What `fast` chooses here'"):
        with_choices(page, "new\n")
