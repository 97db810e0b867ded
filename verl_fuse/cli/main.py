"""Assembles the `verl-fuse` command.

Subcommands are loaded on first use, so `verl-fuse --help` and the planning commands stay fast and need neither torch nor verl.
"""

import importlib
import sys
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from verl_fuse import __version__
from verl_fuse.errors import FuseError

# name -> (module with `app`, one-line help)
SUBCOMMANDS = {
    "doctor": ("verl_fuse.cli.doctor", "Check this installation, in the driver and inside a Ray worker."),
    "plan": ("verl_fuse.cli.plan", "Find devices, layouts and micro-batches for a step, as overrides for verl."),
    "profile": ("verl_fuse.cli.profile", "Measure this device for the planner's cost model."),
    "recipes": ("verl_fuse.cli.recipes", "List the shipped recipes."),
    "run": ("verl_fuse.cli.run", "Run a recipe with verl-fuse on (or --baseline: stock verl)."),
    "schedule": ("verl_fuse.cli.schedule", "Solve, show and compare fused actor-critic pipeline schedules."),
    "simulate": ("verl_fuse.cli.simulate", "Predict a step, stock and with every feature, without a device."),
    "trace": ("verl_fuse.cli.trace", "Print the idle table of a recorded run and name its timeline page."),
}


class _LazyGroup(TyperGroup):
    """A group whose subcommands are imported when they are first asked for.

    Contexts, commands and formatters are `Any`: Typer brings its own copy of click, or depends on click, according to its version.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in SUBCOMMANDS:
            return None
        module, _ = SUBCOMMANDS[cmd_name]
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name][1]) for name in self.list_commands(ctx)])


# Without markup the help is laid out from SUBCOMMANDS alone; with it Typer would import every subcommand.
app = typer.Typer(
    cls=_LazyGroup, rich_markup_mode=None, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verl-fuse {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Faster, strictly on-policy RL steps on stock verl."""


def main(argv: list[str] | None = None) -> None:
    """Entry point: a FuseError becomes one clear message and exit code 2."""
    try:
        app(args=argv, prog_name="verl-fuse")
    except FuseError as error:
        typer.echo(f"verl-fuse: {error}", err=True)
        sys.exit(2)
