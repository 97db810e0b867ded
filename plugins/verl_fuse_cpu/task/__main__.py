"""`python -m verl_fuse_cpu.task --out DIR` makes the task's data and its warm-started model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.make import make
from verl_fuse_cpu.task.parameters import Parameters, WarmStart

DEFAULTS = Parameters()


def main(
    out: Annotated[Path, typer.Option(help="Directory to make; left alone when it already holds this task.")],
    largest: Annotated[int, typer.Option(help="Largest number of a problem.")] = DEFAULTS.largest,
    train: Annotated[int, typer.Option(help="Training problems.")] = DEFAULTS.train,
    validation: Annotated[int, typer.Option(help="Validation problems.")] = DEFAULTS.validation,
    tail_exponent: Annotated[
        float, typer.Option(help="A trace of k lines is drawn in proportion to k to the power of minus this.")
    ] = DEFAULTS.tail_exponent,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = DEFAULTS.seed,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = DEFAULTS.layers,
    tools: Annotated[bool, typer.Option("--tools", help="Let a calculator subtract, one turn each.")] = False,
    steps: Annotated[int, typer.Option(min=20, help="Optimizer steps of the warm start.")] = DEFAULTS.warm_start.steps,
) -> None:
    """Make the Euclid task: problems, a character tokenizer and a warm-started tiny model."""
    try:
        made = make(out, Parameters(largest, train, validation, tail_exponent, seed, layers, tools, WarmStart(steps)))
    except FuseError as error:
        typer.echo(f"verl_fuse_cpu.task: {error}", err=True)
        sys.exit(2)
    typer.echo(f"{out}: {'made' if made else 'already there'}")


if __name__ == "__main__":
    typer.run(main)
