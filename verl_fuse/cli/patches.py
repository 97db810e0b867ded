"""`verl-fuse doctor --patches`: shows the state of each runtime patch in this environment."""

import json
import subprocess
import sys

import typer

from verl_fuse.cli.prose import say
from verl_fuse.errors import FuseError
from verl_fuse_patches import registry
from verl_fuse_patches.registry import PatchStatus

PATCH_COLOURS = {"applied": "green", "refused": "red", "pending": "yellow"}
# A fresh process as verl would find it: its entry points install the patches if this platform asks for them.
_PROGRAM = (
    "import dataclasses, json, verl; from verl_fuse_patches.registry import settle; "
    "print(json.dumps([dataclasses.asdict(s) for s in settle()]))"
)


def examine() -> list[PatchStatus]:
    """Import the modules that the patches wait for in a fresh process, and return the status of each patch; a FuseError
    carries the process's last words."""
    process = subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM], capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise FuseError(f"importing what is patched failed: {last}")
    return [PatchStatus(**status) for status in json.loads(process.stdout.splitlines()[-1])]


def show(statuses: list[PatchStatus]) -> None:
    """Print each patch with the code that it changes, and the reason of its refusal or of its removal."""
    for status in statuses:
        patch = registry.load(status.name)
        typer.secho(f"{status.state}: {patch.name}", fg=PATCH_COLOURS.get(status.state))
        for line in (f"of {patch.target.replace(',', ', ')}", status.detail or f"until {patch.remove_when}"):
            say(f"  {line}")
        if not status.detail:
            typer.echo(f"  {patch.upstream}")
