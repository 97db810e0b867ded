"""`verl-fuse doctor`: tells whether this installation is fit to train, in the driver and inside a Ray worker."""

import contextlib
import dataclasses
import sys
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from verl_fuse.cli import interrupt
from verl_fuse.cli.findings import Finding, examine
from verl_fuse.cli.output import Json, examples, print_json
from verl_fuse.cli.progress import ProgressNotes
from verl_fuse.cli.tables import print_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FINDING_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@app.command(epilog=examples("verl-fuse doctor", "verl-fuse doctor --no-ray --json", "verl-fuse doctor --patches"))
def doctor(
    ray: Annotated[
        bool, typer.Option(help="Examine a Ray worker too: of RAY_ADDRESS, or of a Ray started for this.")
    ] = True,
    patches: Annotated[
        bool, typer.Option(help="List the runtime patches only: applied, off, not needed or refused.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check versions, plugins, entry points, Hydra, patches and a Ray worker; exit 1 on a
    fault, with a fix for each."""
    if patches:
        raise typer.Exit(_patches(as_json))
    # Output that libraries print on import must not end up in the report.
    findings: list[Finding] = []
    interrupted = False
    with contextlib.redirect_stdout(sys.stderr), ProgressNotes("examining this installation") as report:
        try:
            findings.extend(examine(ray=ray, report=report))
        except KeyboardInterrupt:
            interrupted = True
    healthy = all(finding.state != "fault" for finding in findings)
    if as_json:
        print_json(
            {
                "healthy": healthy,
                "interrupted": interrupted,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
    else:
        print_table(table(findings))
    raise typer.Exit(interrupt.CODE if interrupted else 0 if healthy else 1)


def _patches(as_json: bool) -> int:
    from verl_fuse.cli.patches import examine, show

    with ProgressNotes("importing what the patches are for"):
        statuses = examine()
    if as_json:
        print_json({"patches": [dataclasses.asdict(status) for status in statuses]})
    else:
        show(statuses)
    return int(any(status.state == "refused" for status in statuses))


def table(findings: list[Finding]) -> Table:
    """Return the report, one row per finding; the fix stands under the finding's detail."""
    columns = [Column(header, overflow="fold") for header in ("", "check", "found")]
    report = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        found = Text(finding.detail)
        if finding.fix:
            found.append(f"\nfix: {finding.fix}", style="bold")
        report.add_row(Text(finding.state, style=FINDING_STYLES[finding.state]), finding.check, found)
    return report
