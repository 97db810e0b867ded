"""How to install what an optional part needs."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def install(extra: str, root: Path = ROOT) -> str:
    """The command that installs an extra of this distribution: from the clone in `root`, if this runs from
    one; no index may know it."""
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}[{extra}]'"
    return f"pip install 'verl-fuse[{extra}]'"
