"""Checks the upstream versions that this release needs, without importing the packages."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_fuse.extras import install

SUPPORTED = {"verl": ">=0.9.1,<0.10", "TransferQueue": ">=0.1.11,<0.2"}
_FIX = {"verl": install("verl"), "TransferQueue": "pip install 'TransferQueue==0.1.11'"}


def installed(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def problem(distribution: str, found: str | None) -> str | None:
    """Return the fault of this version of `distribution`, or None if the version is supported."""
    allowed = SUPPORTED[distribution]
    if found is None:
        return f"{distribution} is not installed: verl-fuse needs {distribution} {allowed} ({_FIX[distribution]})"
    # A development build of a supported release counts as that release.
    if not SpecifierSet(allowed).contains(Version(found).base_version):
        return (
            f"{distribution} {found} is not supported: verl-fuse needs {distribution} {allowed} ({_FIX[distribution]})"
        )
    return None
