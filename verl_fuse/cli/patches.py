"""`verl-fuse doctor --patches`: shows the state of each runtime patch in this environment."""

import json
import subprocess
import sys

from rich.table import Column, Table
from rich.text import Text

from verl_fuse.errors import FuseError
from verl_fuse_patches import registry
from verl_fuse_patches.registry import PatchStatus

PATCH_STYLES = {"applied": "green", "refused": "bold red", "pending": "yellow"}
# A fresh process as verl would find it: its entry points install the patches if this platform asks for them.
_PROGRAM = (
    "import dataclasses, json, verl; from verl_fuse_patches.registry import settle; "
    "print(json.dumps([dataclasses.asdict(s) for s in settle()]))"
)


def examine() -> list[PatchStatus]:
    """Import the modules that the patches wait for in a fresh process, and return the status of each patch; a FuseError
    carries the process's last words."""
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", _PROGRAM], capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise FuseError(f"importing what is patched failed: {last}")
    return [PatchStatus(**status) for status in json.loads(process.stdout.splitlines()[-1])]


def table(statuses: list[PatchStatus]) -> Table:
    """Return a table with one row per patch; the reason of a refusal, or of a patch's removal, stands under the patched
    code."""
    columns = [Column(header, overflow="fold") for header in ("", "patch", "of")]
    report = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for status in statuses:
        patch = registry.load(status.name)
        note = status.detail or f"until {patch.remove_when} ({patch.upstream})"
        report.add_row(
            Text(status.state, style=PATCH_STYLES.get(status.state, "")), patch.name, Text(f"{patch.target}\n{note}")
        )
    return report
