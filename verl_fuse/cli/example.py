"""`verl-fuse example`: prints a commented file to start from. Tests feed each file back to the commands that read
it."""

from importlib.resources import files
from typing import Annotated

import typer

from verl_fuse.cli.output import examples
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import nearest

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FILES = ("workload", "cluster", "plan")
EXAMPLES = examples(
    "verl-fuse example workload > step.yaml",
    "verl-fuse example cluster > cluster.yaml",
    "verl-fuse simulate step.yaml cluster.yaml",
    "verl-fuse example plan > plan.yaml",
    "verl-fuse simulate step.yaml h100x2 --plan plan.yaml",
)


@app.command(epilog=EXAMPLES)
def example(kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of: {', '.join(FILES)}.")]) -> None:
    """Print a commented workload, cluster or plan file."""
    if kind not in FILES:
        raise FuseError(f"no example {kind!r}{nearest(kind, FILES)}; allowed: {', '.join(FILES)}")
    typer.echo(text_of(kind), nl=False)


def text_of(kind: str) -> str:
    """Return the text of the file as shipped."""
    return files("verl_fuse.cli").joinpath("examples", f"{kind}.yaml").read_text(encoding="utf-8")
