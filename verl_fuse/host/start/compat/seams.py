"""Collects every contract with upstream, and judges them against source."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

from verl_fuse.host.start import contracts
from verl_fuse.host.start.compat import lock
from verl_fuse.host.start.compat.judge import ContractProblem, Level, judge
from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse.spec.contract import Contract, label, package

# Contracts may be about these packages.
PACKAGES = ("verl", "transfer_queue", "vllm", "torch", "megatron", "mbridge")


@dataclass(frozen=True, slots=True)
class Seam:
    """A contract and its owner, which declares it."""

    owner: str
    contract: Contract


@dataclass(frozen=True, slots=True)
class SeamVerdict:
    """The verdict on a seam. `absent`: the seam's package is not there, so there was nothing to judge."""

    seam: Seam
    problems: tuple[ContractProblem, ...] = ()
    absent: bool = False

    @property
    def level(self) -> Level:
        return max((problem.level for problem in self.problems), default=Level.GREEN)


def host_seams() -> list[Seam]:
    """Return the contracts of the host itself."""
    return _filled([host_declared()])


def plugin_seams(manager: pluggy.PluginManager, config: Mapping[str, Any] | None) -> list[Seam]:
    """Return the contracts of the plugins under `config`, or under any configuration (None)."""
    return _filled(plugins_declared(manager, config))


def host_declared() -> tuple[Path, list[Seam]]:
    """Return the host's lock file, and its contracts as its modules declare them."""
    names = sorted(module.name for module in pkgutil.iter_modules(contracts.__path__))
    modules = (importlib.import_module(f"{contracts.__name__}.{name}") for name in names)
    seams = [Seam(module.__name__, contract) for module in modules for contract in module.CONTRACTS]
    return _lock_beside(contracts), seams


def plugins_declared(
    manager: pluggy.PluginManager, config: Mapping[str, Any] | None
) -> Iterator[tuple[Path, list[Seam]]]:
    """Yield the lock file of each plugin, and its contracts as it declares them."""
    asked = {"config": config}
    for impl in manager.hook.fuse_contracts.get_hookimpls():
        declared: Any = impl.function(*(asked[name] for name in impl.argnames))
        yield _lock_beside(impl.function), [Seam(f"plugin {impl.plugin_name}", contract) for contract in declared]


def _lock_beside(declaring: Any) -> Path:
    return Path(inspect.getfile(declaring)).with_name(lock.FILE)


def _filled(declared: Iterable[tuple[Path, list[Seam]]]) -> list[Seam]:
    """Return the seams with the values of their lock files."""
    seams = []
    for file, of_file in declared:
        entries = lock.read(file)
        seams += [Seam(seam.owner, lock.filled(seam.contract, entries, file)) for seam in of_file]
    return seams


def judge_all(seams: Iterable[Seam], tree: SourceTree) -> list[SeamVerdict]:
    """Return a verdict per seam, in order."""
    return [
        SeamVerdict(seam, tuple(judge(seam.contract, tree)))
        if package(seam.contract) in tree.roots
        else SeamVerdict(seam, absent=True)
        for seam in seams
    ]


def lines(verdicts: Iterable[SeamVerdict], level: Level) -> list[str]:
    """Return the problems of one level, one line each, the targets of most contracts first; a missing target is named
    once."""
    counted: dict[str, int] = {}
    for verdict in verdicts:
        for problem in verdict.problems:
            if problem.level is level:
                line = problem.text if problem.missing else f"{label(verdict.seam.contract)}: {problem.text}"
                counted[line] = counted.get(line, 0) + 1
    ordered = sorted(counted.items(), key=lambda item: -item[1])
    return [line if count == 1 else f"{line} ({count} contracts)" for line, count in ordered]
