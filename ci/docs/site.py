"""Build one site of all READMEs, by mkdocs, with every link checked and no network.

Invariants (tests/unit/docs/test_site.py):
- a link of a README that leads nowhere ends the build and is named;
- a link to a folder leads to its README, a link to any other file to a copy of the file;
- the site works from a folder as it does from a server: the search index is a script, not a file to be asked for.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from verl_fuse.errors import FuseError

REPO = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#]+)?(#[^)\s]*)?(\))")
# GitHub shows the contribution guide from a folder that mkdocs leaves out.
MOVED = {".github/CONTRIBUTING.md": "CONTRIBUTING.md"}


def gather(repo: Path, pages: list[Path], folder: Path) -> None:
    """Copy the pages (relative to `repo`) and all files that the pages link into `folder`; a FuseError names links that
    lead nowhere."""
    broken: list[str] = []
    linked: set[Path] = set()
    for page in pages:
        text = (repo / page).read_text(encoding="utf-8")

        def followed(match: re.Match[str], page: Path = page) -> str:
            target = match[2]
            if target is None or "://" in target:
                return match[0]
            path = Path(os.path.normpath(page.parent / target))
            if not (repo / path).exists():
                broken.append(f"{page}: {target}")
                return match[0]
            if (repo / path).is_dir():
                path = path / "README.md" if (repo / path / "README.md").exists() else page
            linked.add(path)
            here = Path(MOVED.get(str(page), page)).parent
            return f"{match[1]}{os.path.relpath(MOVED.get(str(path), path), here)}{match[3] or ''}{match[4]}"

        place(folder, page).write_text(LINK.sub(followed, text), encoding="utf-8")
    if broken:
        raise FuseError(*(f"link that leads nowhere: {each}" for each in broken))
    for path in linked - set(pages):
        shutil.copyfile(repo / path, place(folder, path))


def place(folder: Path, path: Path) -> Path:
    """Return the place of a repository's file in the site's sources, and make its folder."""
    target = folder / MOVED.get(str(path), path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def tracked_pages() -> list[Path]:
    """Return every page of the repository, relative to the repository."""
    found = [path.relative_to(REPO) for path in REPO.rglob("*.md")]
    hidden = {"build", "dist", "runs", "outputs", "results"}
    return sorted(
        path
        for path in found
        if not hidden & set(path.parts) and (not any(part.startswith(".") for part in path.parts) or str(path) in MOVED)
    )


def build(target: Path) -> None:
    """Write the site to `target`; raise FuseError where mkdocs finds fault."""
    sources = target.with_name(f"{target.name}-sources")
    shutil.rmtree(sources, ignore_errors=True)
    gather(REPO, tracked_pages(), sources)
    config = Path(__file__).with_name("mkdocs.yml")
    environment = {**os.environ, "DOCS_SOURCES": str(sources), "DOCS_SITE": str(target)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(config)]
    if subprocess.run(command, env=environment).returncode:
        raise FuseError(f"mkdocs found fault with {sources}")
    # It would look for its style sheets at the root of the server.
    (target / "404.html").unlink()
    index = (target / "search/search_index.json").read_text(encoding="utf-8")
    (target / "search/search_index.js").write_text(f"const searchIndex = {index};\n", encoding="utf-8")
