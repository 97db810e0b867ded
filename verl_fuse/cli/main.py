"""Assembles the `verl-fuse` command.

Subcommands are loaded on first use, so `verl-fuse --help` and the planning commands stay fast and need neither torch nor verl.
"""

import importlib
import sys
from collections.abc import Callable

import click
import typer.main

from verl_fuse import __version__
from verl_fuse.errors import FuseError

# name -> (module with `app`, one-line help)
SUBCOMMANDS = {
    "doctor": ("verl_fuse.cli.doctor", "Check this installation, in the driver and inside a Ray worker."),
    "recipes": ("verl_fuse.cli.recipes", "List the shipped recipes."),
    "run": ("verl_fuse.cli.run", "Run a recipe with verl-fuse on (or --baseline: stock verl)."),
    "schedule": ("verl_fuse.cli.schedule", "Solve, show and compare fused actor-critic pipeline schedules."),
    "trace": ("verl_fuse.cli.trace", "Print the idle table of a recorded run and name its timeline page."),
}


class _LazyGroup(click.Group):
    """A group whose subcommands are imported when they are first asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module, _ = SUBCOMMANDS[cmd_name]
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_LazyGroup, help="Faster, strictly on-policy RL steps on stock verl.")
@click.version_option(__version__, prog_name="verl-fuse")
def _root() -> None:
    pass


def main(argv: list[str] | None = None) -> None:
    """Entry point: a FuseError becomes one clear message and exit code 2."""
    run: Callable[..., object] = _root.main
    try:
        run(args=argv, prog_name="verl-fuse")
    except FuseError as error:
        click.echo(f"verl-fuse: {error}", err=True)
        sys.exit(2)
