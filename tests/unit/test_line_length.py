"""Configuration and pages keep to the length of a line of code; ruff checks Python, test_readme.py the READMEs."""

from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
LONGEST = 120
FOLDERS = ("ci", "patches", "plugins", "recipes", "verl_fuse", ".github")
KINDS = (".css", ".html", ".js", ".sh", ".toml", ".yaml", ".yml")
FILES = [path for folder in FOLDERS for path in (REPO / folder).rglob("*") if path.suffix in KINDS]


@pytest.mark.parametrize("path", [REPO / "pyproject.toml", *FILES], ids=lambda path: str(path.relative_to(REPO)))
def test_no_line_is_longer_than_a_line_of_code(path: Path):
    # One word, such as keys in braces, cannot be broken.
    words = [line for line in path.read_text().splitlines() if len(line.lstrip(" #").split()) > 1]
    assert [line for line in words if len(line) > LONGEST] == []
