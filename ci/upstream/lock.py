"""`python -m ci.upstream lock` writes the lock files of contracts: what contracts copy from upstream's source.

New names are added, names that no contract declares here are dropped, and changed code behind a kept signature gets a
further fingerprint. What breaks a contract is never written over, unless --renew names it: nothing is written then, and
the exit code is 2. Exit code 1: --check found a file that is not what the command would write; 3: bad usage.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from ci.upstream.arguments import FAILED, Parser
from ci.upstream.check import add_versions, upstream
from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.fingerprint import fingerprint
from verl_fuse.host.start.compat.judge import Level, code, judge
from verl_fuse.host.start.compat.lock import Locked, fill, is_locked, read
from verl_fuse.host.start.compat.seams import host_declared, plugins_declared
from verl_fuse.host.start.compat.signature import signature_text
from verl_fuse.host.start.compat.source import FunctionNode, NotFound, SourceTree
from verl_fuse.spec.contract import Attribute, Code, ConfigGroup, ConfigKey, Contract, Name, label, package
from verl_fuse.spec.files import write_atomically

# Contracts about one target share an entry, which holds what the first kind of these needs.
_FULLEST = (Attribute, Name, Code, ConfigKey, ConfigGroup)


def main(arguments: list[str]) -> int:
    """Write the lock files, or compare them with --check."""
    parser = Parser(
        prog="python -m ci.upstream lock", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_versions(parser)
    parser.add_argument("--check", action="store_true", help="write nothing, name the files that would change")
    parser.add_argument(
        "--renew", action="append", default=[], metavar="NAME", help="take over this name, though it breaks a contract"
    )
    options = parser.parse_args(arguments)
    try:
        with upstream(options) as (tree, _):
            texts, broken = lock_all(declared(), tree, options.renew)
    except (FuseError, OSError) as error:
        print(f"ci.upstream lock: {error}", file=sys.stderr)
        return FAILED
    if broken:
        print("Nothing is written:", *broken, sep="\n  - ", file=sys.stderr)
        return int(Level.RED)
    changed = [file for file, text in texts.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in changed:
        print(f"{file} {'differs' if options.check else 'is written'}")
        if not options.check:
            write_atomically(file, texts[file])
    return int(Level.YELLOW if options.check and changed else Level.GREEN)


def declared() -> dict[Path, list[Contract]]:
    """Return the locked contracts of the host and of all plugins, by their lock files."""
    files: dict[Path, list[Contract]] = {}
    for file, seams in (host_declared(), *plugins_declared(plugins.load(), None)):
        if of_file := [seam.contract for seam in seams if is_locked(seam.contract)]:
            files.setdefault(file, []).extend(of_file)
    return files


def lock_all(
    files: Mapping[Path, Iterable[Contract]], tree: SourceTree, renew: Collection[str] = ()
) -> tuple[dict[Path, str], list[str]]:
    """Return the text of each lock file as `tree` has the contracts' targets, and what cannot be locked."""
    texts, broken, known = {}, [], set()
    for file, contracts in files.items():
        before, entries = read(file), {}
        for name, of_name in _by_label(contracts).items():
            known.add(name)
            try:
                entries[name] = _entry(of_name, before.get(name), tree, name in renew)
            except FuseError as error:
                broken.append(f"{name}: {error}")
        texts[file] = text(entries)
    return texts, broken + [f"--renew {name}: no contract has this name" for name in renew if name not in known]


def text(entries: Mapping[str, Locked]) -> str:
    """Return the text of a lock file: one line per entry, sorted, without empty values."""
    lines = []
    for name, entry in sorted(entries.items()):
        values = {key: value for key, value in asdict(entry).items() if value not in (None, ())}
        lines.append(f" {json.dumps(name)}: {json.dumps(values)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _by_label(contracts: Iterable[Contract]) -> dict[str, list[Contract]]:
    found: dict[str, list[Contract]] = {}
    for contract in contracts:
        found.setdefault(label(contract), []).append(contract)
    return found


def _entry(contracts: list[Contract], before: Locked | None, tree: SourceTree, renewed: bool) -> Locked:
    """Return the entry of the contracts about one target; a FuseError if the target is not there or breaks them."""
    if package(contracts[0]) not in tree.roots:
        if before is None:
            raise FuseError(f"{package(contracts[0])} is not installed")
        return before
    found = _found(min(contracts, key=lambda contract: _FULLEST.index(type(contract))), tree)
    if all(isinstance(contract, Name) and contract.called for contract in contracts):
        found = replace(found, read=())
    if before is None:
        return found
    if not renewed:
        problems = [problem for contract in contracts for problem in judge(fill(contract, before), tree)]
        if red := dict.fromkeys(problem.text for problem in problems if problem.level is Level.RED):
            raise FuseError("; ".join(red))
    read = tuple(dict.fromkeys((*before.read, *found.read))) if found.read else ()
    return replace(found if renewed else before, read=read)


def _found(contract: Contract, tree: SourceTree) -> Locked:
    match contract:
        case Name(target):
            node = tree.find(target).node
            if isinstance(node, FunctionNode):
                # A constant's name says nothing about the default.
                signature = re.sub(r"=[A-Z][A-Z0-9_]+(?=[,)])", "=...", signature_text(node))
                return Locked("function", signature, (fingerprint([node]),))
            return Locked("class" if isinstance(node, ast.ClassDef) else "attribute")
        case Attribute(target):
            value = getattr(tree.find(target).node, "value", None)
            if value is None:
                raise NotFound("it has no value to lock")
            return Locked("attribute", value=ast.unparse(value))
        case ConfigGroup(file, entry):
            group = entry.partition(":")[0]
            options = [one[group] for one in tree.key(file, "defaults") if isinstance(one, dict) and group in one]
            if len(options) != 1:
                raise NotFound(f"{file} has {len(options)} entries {group} among its defaults")
            return Locked("group", value=options[0])
        case ConfigKey(file, key):
            return Locked("key", value=tree.key(file, key))
        case Code():
            return Locked("code", read=(fingerprint([found.node for found in code(contract, tree)]),))
        case _:
            raise NotFound(f"{label(contract)} cannot be locked")
