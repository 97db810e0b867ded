"""What `fuse.preset=fast` chooses for the recipes of GPUs, in their READMEs, as `verl-fuse check` prints it.

Invariant (tests/unit/docs/test_recipe_pages.py): the text in each README is what the command prints.
"""

from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from verl_fuse.cli.check import check
from verl_fuse.errors import FuseError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# On the cpu platform the preset chooses by what the machine is, so recipes of CPUs print it at their start alone.
OF_GPUS = "*-8gpu"
HEADING = "## What `fast` chooses here\n\n"
_FENCE = "```"


def pages() -> Iterator[tuple[Path, str]]:
    """Yield the README of each recipe of GPUs and the text that it should have."""
    for folder in sorted(RECIPES.glob(OF_GPUS)):
        page = folder / "README.md"
        yield page, with_choices(page, printed(folder))


def printed(folder: Path) -> str:
    """Return what the command prints for the recipe."""
    with redirect_stdout(StringIO()) as said:
        check([], folder / "config.yaml")
    return said.getvalue().replace(f"{folder.parents[1]}/", "")


def with_choices(page: Path, said: str) -> str:
    """Return the page with the command and what it prints below the heading."""
    before, heading, rest = page.read_text(encoding="utf-8").partition(HEADING)
    if not heading:
        raise FuseError(f"{page}: needs the heading {HEADING.strip()!r}")
    after = rest.partition(f"\n{_FENCE}\n")[2]
    command = f"verl-fuse check --script recipes/{page.parent.name}/config.yaml"
    return f"{before}{heading}{_FENCE}text\n$ {command}\n{said}{_FENCE}\n{after}"
