"""`python -m ci.upstream check` tells whether versions of verl and vLLM keep the contracts that verl-fuse rests on.

Exit code: 0 green; 1 yellow, code changed that has to be read again; 2 red, verl-fuse would break; 3 no check was
possible.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ci.upstream import report
from ci.upstream.arguments import FAILED, Parser
from ci.upstream.fetch import fetch
from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.judge import Level
from verl_fuse.host.start.compat.seams import PACKAGES, SeamVerdict, host_seams, judge_all, plugin_seams
from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse.spec.files import write_atomically


@dataclass(frozen=True, slots=True)
class Checked:
    """The judged installation: a tree in which verl and vLLM may differ from the installed ones, verl's version, the
    version of vLLM if it was asked for, and the verdicts."""

    tree: SourceTree
    version: str
    vllm: str | None
    verdicts: list[SeamVerdict]

    @property
    def level(self) -> Level:
        return max((verdict.level for verdict in self.verdicts), default=Level.GREEN)


def check(tree: SourceTree, vllm: str | None = None) -> Checked:
    """Judge every contract, of all plugins, against `tree`, which has that version of vLLM (None: the installed)."""
    verdicts = judge_all([*host_seams(), *plugin_seams(plugins.load(), None)], tree)
    return Checked(tree, version_of(tree.roots["verl"]), vllm, verdicts)


def version_of(package: Path) -> str:
    """Return the version in verl's own version file."""
    file = package / "version" / "version"
    return (file.is_file() and file.read_text(encoding="utf-8").strip()) or "of unknown version"


def package_folder(tree: Path) -> Path:
    """Return verl's package folder in a source tree or an unpacked wheel; the folder itself counts too."""
    # `.` has no name.
    for folder in (tree / "verl", tree.absolute()):
        if (folder / "__init__.py").is_file() and folder.name == "verl":
            return folder
    raise FuseError(f"--path {tree}: neither a package folder verl nor one that contains it")


def main(arguments: list[str]) -> int:
    """Print the Markdown report, and write it with its JSON form to --output; the exit code gives the verdict."""
    options = _parser().parse_args(arguments)
    try:
        with upstream(options) as (tree, vllm):
            checked = check(tree, vllm)
            installed = SourceTree.installed(*PACKAGES)
            found = report.build(checked.tree, checked.version, checked.vllm, checked.verdicts, installed)
        text = report.markdown(found)
        print(text, end="")
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            write_atomically(options.output / "upstream.md", text)
            write_atomically(options.output / "upstream.json", report.as_json(found))
    # An OSError is a folder that cannot be read or written, or a full disk. Python's own exit code for an error, 1,
    # means yellow here.
    except (FuseError, OSError) as error:
        print(f"ci.upstream check: {error}", file=sys.stderr)
        return FAILED
    return int(checked.level)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m ci.upstream check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_versions(parser)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write upstream.md and upstream.json there")
    return parser


def add_versions(parser: Parser) -> None:
    """Add the arguments of `upstream`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--verl", metavar="VERSION", help="a version on the package index, or `latest`; default: installed"
    )
    which.add_argument("--path", type=Path, metavar="TREE", help="a source tree or unpacked wheel")
    parser.add_argument(
        "--vllm", metavar="VERSION", help="a version of vLLM on the package index, or `latest`; default: installed"
    )


@contextmanager
def upstream(options: argparse.Namespace) -> Iterator[tuple[SourceTree, str | None]]:
    """Give the installed packages with the verl and vLLM that `options` name, and the version of that vLLM."""
    tree = SourceTree.installed(*PACKAGES)
    with _verl(options.verl, options.path) as verl, _vllm(options.vllm) as vllm:
        if verl is not None:
            tree.roots["verl"] = verl
        if vllm is not None:
            tree.roots["vllm"] = vllm[0]
        if "verl" not in tree.roots:
            raise FuseError("verl is not installed: give --verl VERSION or --path TREE")
        yield tree, vllm and vllm[1]


@contextmanager
def _verl(version: str | None, path: Path | None) -> Iterator[Path | None]:
    if version is None:
        yield None if path is None else package_folder(path)
        return
    with tempfile.TemporaryDirectory(prefix="verl-fuse-upstream-") as folder:
        yield package_folder(fetch("verl", version, Path(folder))[0])


@contextmanager
def _vllm(version: str | None) -> Iterator[tuple[Path, str] | None]:
    if version is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="verl-fuse-upstream-") as folder:
        unpacked, found = fetch("vllm", version, Path(folder))
        yield unpacked / "vllm", found
