"""`verl-fuse example`: a commented file to start from, or the package of a plugin. Tests feed each file back to the
commands that read it, install the package and run its tests."""

import shlex
import tempfile
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from verl_fuse.cli.output import examples
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import nearest
from verl_fuse.spec.files import reason

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FILES, PLUGIN = ("workload", "cluster", "plan"), "plugin"
KINDS = (*FILES, PLUGIN)
# The files of the package have it at the end of their names here, where they are no code of this library.
TEMPLATE = ".txt"
EXAMPLES = examples(
    "verl-fuse example workload > step.yaml",
    "verl-fuse example cluster > cluster.yaml",
    "verl-fuse simulate step.yaml cluster.yaml",
    "verl-fuse example plan > plan.yaml",
    "verl-fuse simulate step.yaml h100x2 --plan plan.yaml",
    "verl-fuse example plugin --out acme-fuse",
)


@app.command(epilog=EXAMPLES)
def example(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of: {', '.join(KINDS)}.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=f"For {PLUGIN}: a folder that is made.")] = None,
) -> None:
    """Print a commented workload, cluster or plan file, or write the package of a plugin with its tests."""
    if kind not in KINDS:
        raise FuseError(f"no example {kind!r}{nearest(kind, KINDS)}; allowed: {', '.join(KINDS)}")
    if kind == PLUGIN:
        if out is None:
            raise FuseError(f"example {PLUGIN} is a folder of files: add --out DIR, a folder that does not exist yet")
        write_plugin(out)
        typer.echo(
            f"{out}: a plugin; next: {shlex.join(('pip', 'install', '-e', str(out)))}, then "
            f"{shlex.join(('python', '-m', 'pytest', str(out / 'tests')))}"
        )
        return
    if out is not None:
        raise FuseError(f"--out is for {PLUGIN}; example {kind} is printed: verl-fuse example {kind} > {kind}.yaml")
    typer.echo(text_of(kind), nl=False)


def text_of(kind: str) -> str:
    """Return the text of the file as shipped."""
    return _shipped().joinpath(f"{kind}.yaml").read_text(encoding="utf-8")


def write_plugin(folder: Path) -> None:
    """Write the package of a plugin into a folder that is made; a FuseError says why not, and then nothing is left."""
    if folder.exists() or folder.is_symlink():
        raise FuseError(f"--out {folder}: it exists; name a folder that does not exist yet, or move this one away")
    try:
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}.") as beside:
            made = Path(beside) / folder.name
            _copy(_shipped().joinpath(PLUGIN), made)
            made.rename(folder)
    except OSError as error:
        raise FuseError(f"--out {folder}: cannot be written: {reason(error)}") from error


def _copy(source: Traversable, target: Path) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.is_dir():
            _copy(entry, target / entry.name)
        elif entry.name.endswith(TEMPLATE):
            (target / entry.name.removesuffix(TEMPLATE)).write_bytes(entry.read_bytes())


def _shipped() -> Traversable:
    return files("verl_fuse.cli").joinpath("examples")
