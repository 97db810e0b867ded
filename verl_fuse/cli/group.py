"""Assembles the `verl-fuse` command from its list of subcommands, each imported when it is first asked for."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import typer
import typer.main
from typer.core import TyperGroup

from verl_fuse import __version__
from verl_fuse.cli import interrupt
from verl_fuse.cli.output import examples
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import nearest

# Title of a group in the help -> name of a subcommand -> (module with `app`, one-line help).
Groups: TypeAlias = Mapping[str, Mapping[str, tuple[str, str]]]
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
# Click lays out a group without markup, and fills up each paragraph that does not begin with this mark.
EXAMPLES = "\b\n" + examples(
    "verl-fuse doctor                           is this installation sound?",
    "verl-fuse check --script run.sh            what does it do for my run?",
    "verl-fuse example workload > step.yaml     a file to start from",
    "verl-fuse simulate step.yaml h100x4        what would each feature gain?",
    "verl-fuse run ppo-cpu                      train a small model on a CPU",
)


class _LazyGroup(TyperGroup):
    """A group whose subcommands are imported when they are first asked for.

    Contexts, commands and formatters are `Any`: Typer brings its own copy of click, or depends on click,
    according to its version.
    """

    groups: Groups = MappingProxyType({})
    subcommands: Mapping[str, tuple[str, str]] = MappingProxyType({})

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.subcommands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.subcommands and not name.startswith("-"):
            raise FuseError(
                f"no command {name!r}{nearest(name, self.subcommands)}; there is {', '.join(self.list_commands(ctx))}"
            )
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.subcommands:
            return None
        module, _ = self.subcommands[cmd_name]
        with interrupt.on_interrupt(interrupt.end_now):
            command = typer.main.get_command(importlib.import_module(module).app)
        command.name = cmd_name
        command.help = _filled(command.help or "")
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, self.subcommands))
        for title, entries in self.groups.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), text) for name, (_, text) in entries.items()])


def _filled(text: str) -> str:
    """Return each paragraph on one line: Typer fills the first paragraph up to the terminal, and keeps the source's
    line breaks in the others."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def build(groups: Groups) -> typer.Typer:
    """Return the command with these subcommands."""
    subcommands = {name: entry for entries in groups.values() for name, entry in entries.items()}
    group = type("Group", (_LazyGroup,), {"groups": groups, "subcommands": subcommands})
    # Without markup the list alone lays out the help; with it Typer would import every subcommand.
    app = typer.Typer(
        cls=group,
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings=HELP_OPTIONS,
    )
    app.callback(epilog=EXAMPLES)(_root)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verl-fuse {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Faster, strictly on-policy RL steps on stock verl."""
