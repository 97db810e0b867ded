"""`verl-fuse doctor`: is this installation fit to train, in the driver and inside a Ray worker?"""

import contextlib
import dataclasses
import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_fuse.cli.findings import Finding, examine

app = typer.Typer()
STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@app.command()
def doctor(
    ray: Annotated[
        bool, typer.Option(help="Examine a Ray worker too: of RAY_ADDRESS, or of a Ray started for this.")
    ] = True,
    patches: Annotated[
        bool, typer.Option(help="List the runtime patches only: applied, off, not needed or refused.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check versions, plugins, entry points, Hydra, patches and a Ray worker; exit 1 on a fault, with a fix for each."""
    if patches:
        raise typer.Exit(_patches(as_json))
    # What libraries print on import must not end up in the report.
    with contextlib.redirect_stdout(sys.stderr), Console(stderr=True).status("examining this installation"):
        findings = list(examine(ray=ray))
    healthy = all(finding.state != "fault" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"healthy": healthy, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        Console().print(table(findings))
    raise typer.Exit(0 if healthy else 1)


def _patches(as_json: bool) -> int:
    from verl_fuse.cli.patches import examine, table

    statuses = examine()
    if as_json:
        typer.echo(json.dumps({"patches": [dataclasses.asdict(status) for status in statuses]}))
    else:
        Console().print(table(statuses))
    return int(any(status.state == "refused" for status in statuses))


def table(findings: list[Finding]) -> Table:
    """The report, one row per finding; the fix stands under what was found."""
    report = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "check", "found"):
        report.add_column(column, overflow="fold")
    for finding in findings:
        found = Text(finding.detail)
        if finding.fix:
            found.append(f"\nfix: {finding.fix}", style="bold")
        report.add_row(Text(finding.state, style=STYLES[finding.state]), finding.check, found)
    return report
