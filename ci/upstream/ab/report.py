"""Write the result of an A/B comparison, as Markdown for people and JSON for programs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ci.upstream.ab.compare import Finding
from verl_fuse.host.start.compat.judge import Level


@dataclass(frozen=True)
class Compared:
    """One recipe in one arm beside stock verl; `log` is the end of the log of a run that failed.

    `first` has the findings of a first run that was yellow: this comparison is of the second run, which counts.
    """

    recipe: str
    arm: str
    findings: tuple[Finding, ...]
    log: str = ""
    first: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> Level:
        """Return red if the run failed or numbers differ, yellow if only time or memory are outside their bands, else
        green."""
        kinds = {finding.kind for finding in self.findings if not finding.passed}
        return Level.RED if kinds - {"time", "memory"} else Level.YELLOW if kinds else Level.GREEN


@dataclass(frozen=True)
class Report:
    """All comparisons of one call, and the components and conditions of the runs."""

    versions: Mapping[str, str | None]
    conditions: Mapping[str, str]
    compared: Sequence[Compared]

    @property
    def verdict(self) -> Level:
        return max(one.verdict for one in self.compared)

    def as_dict(self) -> dict:
        """Return the whole report, for JSON; infinite and missing values as text."""
        return {
            "verdict": name_of(self.verdict),
            "versions": dict(self.versions),
            "conditions": dict(self.conditions),
            "compared": [
                {
                    "recipe": one.recipe,
                    "arm": one.arm,
                    "verdict": name_of(one.verdict),
                    "findings": [_plain(finding) for finding in one.findings],
                    "first": [_plain(finding) for finding in one.first],
                    "log": one.log,
                }
                for one in self.compared
            ],
        }

    def as_markdown(self) -> str:
        lines = [
            f"# A/B against stock verl {self.versions['verl']}: {name_of(self.verdict)}",
            "",
            (
                "Same rollouts, replayed: `exact` means the same bits as stock verl. Red: a run failed or numbers "
                "differ. Yellow: time or memory"
            ),
            "outside their bands.",
            "",
            *(f"- {name}: {value or 'not there'}" for name, value in {**self.versions, **self.conditions}.items()),
        ]
        for one in self.compared:
            lines += ["", f"## {one.recipe}, {one.arm}: {name_of(one.verdict)}", "", *_table(one)]
            if one.first:
                faults = [finding for finding in one.first if not finding.passed]
                told = "; ".join(f"{finding.what} {_amount(finding, finding.value)}" for finding in faults)
                lines += ["", f"Run twice, this is the second time. The first time: {told}."]
            if one.log:
                lines += ["", "```", one.log.strip(), "```"]
        return "\n".join(lines) + "\n"


def name_of(level: Level) -> str:
    return level.name.lower()


def worst_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """Return the worst finding of each comparison, over all steps: faults first, else in the order found."""
    worst: dict[str, Finding] = {}
    for finding in findings:
        kept = worst.get(finding.what)
        if kept is None or _badness(finding) > _badness(kept):
            worst[finding.what] = finding
    return sorted(worst.values(), key=lambda finding: finding.passed)


def _badness(finding: Finding) -> tuple[bool, float]:
    return not finding.passed, math.inf if math.isnan(finding.value) else finding.value


def _table(one: Compared) -> list[str]:
    worst = worst_of_each(one.findings)
    metrics = [finding for finding in worst if finding.kind == "metrics" and finding.passed]
    shown = [finding for finding in worst if not finding.passed or finding.kind not in ("run", "metrics")]
    rows = [
        f"| {'' if finding.passed else '**fault** '}{finding.what} | {_amount(finding, finding.value)} "
        f"| {_amount(finding, finding.allowed)} | {finding.where} |"
        for finding in shown
    ]
    if metrics:
        largest = max(metrics, key=lambda finding: finding.value)
        where = f"{largest.what}, {largest.where}" if largest.value else ""
        value, allowed = (_amount(largest, number) for number in (largest.value, largest.allowed))
        rows.append(f"| {len(metrics)} metrics of verl | {value} | {allowed} | {where} |")
    return ["| compared | worst | allowed | where |", "|---|---|---|---|", *rows]


def _amount(finding: Finding, number: float) -> str:
    if finding.kind in ("time", "memory"):
        return f"{number:.3g} x"
    return "exact" if number == 0 else f"{number:.3g}"


def _plain(finding: Finding) -> dict:
    value = finding.value if math.isfinite(finding.value) else str(finding.value)
    return {**asdict(finding), "value": value, "passed": finding.passed}
