"""Completes the package's metadata when hatchling builds it: the addresses of its repository, and a long description in
which no link is dead.

Invariants (tests/unit/test_package.py):
- no address is made up: a build without VERL_FUSE_REPOSITORY names none, and its long description has no link to a file
  of the repository, and no picture;
- a build with it names source, documentation, issues, security and changes, and every link is absolute, to the files
  of the tag of this version.

hatchling loads this file by its path, so it imports nothing of the repository.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "VERL_FUSE_REPOSITORY"
ADDRESS = re.compile(r"https://[\w.-]+(:\d+)?(/[\w.~-]+){2,}/?")
# A picture with its caption, a paragraph in italics; and a link or picture to a file or a folder.
PICTURE = re.compile(r"^!\[[^\]]*\]\((?!\w+://)[^)]*\)\n(?:\n\*[^*]+\*\n)?\n?", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+://)([^)\s#]+)(#[^)\s]*)?\)")


class RepositoryMetadata(MetadataHookInterface):
    """Sets `readme` and `urls`, which pyproject.toml declares as dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Complete the table `project` of pyproject.toml, in which hatchling has put the version."""
        address, root = repository(os.environ), Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        text = absolute(text, address, metadata["version"], root) if address else without_links(text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(address, metadata["version"]) if address else {}


def repository(environment: Any) -> str:
    """Return the address of the repository, without a slash at its end, or an empty text where none is given; a
    ValueError says what an address needs."""
    given = environment.get(REPOSITORY, "")
    if given and (not ADDRESS.fullmatch(given) or given.endswith(".git")):
        raise ValueError(
            f"{REPOSITORY}={given!r}: needs the address of the repository's pages, https://HOST/OWNER/NAME, without a "
            "name of a user, a query or .git; unset it to build without addresses"
        )
    return given.rstrip("/")


def urls(address: str, version: str) -> dict[str, str]:
    """Return the addresses by their names in the metadata."""
    files = f"{address}/blob/v{version}"
    return {
        "Source": address,
        "Documentation": f"{files}/verl_fuse/README.md",
        "Issues": f"{address}/issues",
        "Security": f"{files}/SECURITY.md",
        "Changes": f"{files}/CHANGELOG.md",
    }


def absolute(text: str, address: str, version: str, root: Path) -> str:
    """Return a page of `root` with the address of the linked file in each link, at the tag of this version."""

    def followed(match: re.Match[str]) -> str:
        mark, words, path, anchor = match.groups()
        kind = "raw" if mark else "tree" if (root / path).is_dir() else "blob"
        return f"{mark}[{words}]({address}/{kind}/v{version}/{path}{anchor or ''})"

    return LINK.sub(followed, text)


def without_links(text: str) -> str:
    """Return a page without pictures, with the words of each link to a file in its place."""
    return LINK.sub(lambda match: match[2], PICTURE.sub("", text))
