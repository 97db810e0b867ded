"""Tells how to install the packages that an optional part needs."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def install(extra: str, root: Path = ROOT) -> str:
    """Return the command that installs an extra of this distribution: from the clone in `root`, if this code runs from
    a clone, since an index may not know the distribution."""
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}[{extra}]'"
    return f"pip install 'verl-fuse[{extra}]'"
