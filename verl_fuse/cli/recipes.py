"""`verl-fuse recipes`: lists and finds shipped recipes. A recipe is a folder with README.md, config.yaml, run.sh and
run_baseline.sh.

Recipes lie in `recipes/` of a checkout and in `verl_fuse_recipes/` of an installation. The list shows the block
`recipe` of each config.yaml.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from yaml import YAMLError

import verl_fuse
from verl_fuse.cli.output import examples
from verl_fuse.cli.tables import print_table
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import nearest

app = typer.Typer(add_completion=False)

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Recipe:
    """One shipped recipe; `prepare` names the task that `verl-fuse run` makes first, None if there is no task."""

    name: str
    folder: Path
    summary: str
    algorithm: str
    hardware: str
    prepare: str | None


@app.command(epilog=examples("verl-fuse recipes"))
def recipes() -> None:
    """List the shipped recipes."""
    table = Table("recipe", "algorithm", "hardware", "what for", box=None, padding=(0, 2, 0, 0))
    for recipe in all_recipes():
        table.add_row(recipe.name, recipe.algorithm, recipe.hardware, recipe.summary)
    print_table(table)
    Console().print(
        f"Run one: verl-fuse run NAME [overrides]. Folder: {recipes_folder()}", markup=False, soft_wrap=True
    )


def recipes_folder() -> Path:
    """Return the folder with the recipes of this installation; a FuseError if there is none."""
    root = Path(verl_fuse.__file__).parent.parent
    for folder in (root / "recipes", root / "verl_fuse_recipes"):
        if any(folder.glob(f"*/{CONFIG}")):
            return folder
    raise FuseError(
        f"no recipes in {root / 'recipes'} or {root / 'verl_fuse_recipes'}: this installation is incomplete"
    )


def all_recipes() -> list[Recipe]:
    return list(_load(recipes_folder()))


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; a FuseError lists the choices."""
    found = {recipe.name: recipe for recipe in all_recipes()}
    if name not in found:
        raise FuseError(f"no recipe {name!r}{nearest(name, found)}; choose from: {', '.join(found)}")
    return found[name]


def _load(root: Path) -> Iterator[Recipe]:
    for file in sorted(root.glob(f"*/{CONFIG}")):
        try:
            about = OmegaConf.select(OmegaConf.load(file), "recipe")
            prepare = about.get("prepare")
            yield Recipe(
                file.parent.name, file.parent, about["summary"], about["algorithm"], about["hardware"], prepare
            )
        except (OSError, YAMLError, OmegaConfBaseException, KeyError, TypeError, AttributeError) as error:
            needed = "its block `recipe` (summary, algorithm, hardware) cannot be read"
            raise FuseError(f"{file}: {needed}: {error!r}") from error
