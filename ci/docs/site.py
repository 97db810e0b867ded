"""Build one site of all READMEs, by mkdocs, with every link checked and no network; with pages that the site alone has
(pages/), examples of the library's own pages, and the reference.

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
from contextlib import chdir
from pathlib import Path

from ci.docs.reference import write as write_reference
from verl_fuse.errors import FuseError
from verl_fuse.timeline.files import readable_steps, record_step, recorded_steps

REPO = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#]+)?(#[^)\s]*)?(\))")
HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded"
OWN = sorted(path.relative_to(REPO) for path in (HERE / "pages").glob("*.md"))
# GitHub shows the contribution guide from a folder that mkdocs leaves out; links of the site's own pages are those of
# pages at its root.
MOVED = {".github/CONTRIBUTING.md": "CONTRIBUTING.md", **{str(path): path.name for path in OWN}}


def gather(repo: Path, pages: list[Path], folder: Path) -> None:
    """Copy the pages (relative to `repo`) and all files that the pages link into `folder`, where what is made may lie
    already; a FuseError names links that lead nowhere."""
    broken: list[str] = []
    linked: set[Path] = set()
    for page in pages:
        text = (repo / page).read_text(encoding="utf-8")

        def followed(match: re.Match[str], page: Path = page) -> str:
            target = match[2]
            if target is None or "://" in target:
                return match[0]
            at = Path() if page in OWN else page.parent
            path = Path(os.path.normpath(at / target))
            if (folder / path).is_file() and not (repo / path).exists():
                return match[0]
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


def write_examples(folder: Path) -> None:
    """Write the pages of the recorded runs: their timelines, their comparison, and strategies for their lengths."""
    shutil.copytree(RECORDED, folder)
    runs = ["grpo-observe", "grpo-fast"]
    with chdir(folder):
        for run in runs:
            for timeline in list(readable_steps(Path(run), recorded_steps(Path(run)))):
                record_step(Path(run), timeline)
        _verl_fuse("compare", *runs, "--html", "comparison.html")
        _verl_fuse("simulate", "workload.yaml", "h100x1", "--seeds", "4", "--timeline", "strategies")
        for path in Path("strategies").rglob("*.json"):
            path.unlink()


def _verl_fuse(*arguments: str) -> None:
    program = [sys.executable, "-c", "from verl_fuse.cli import main; main()"]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise FuseError(f"verl-fuse {' '.join(arguments)}: {done.stderr.strip()}")


def build(target: Path) -> None:
    """Write the site to `target`; raise FuseError where mkdocs finds fault."""
    sources = target.with_name(f"{target.name}-sources")
    shutil.rmtree(sources, ignore_errors=True)
    made = sources.with_name(f"{sources.name}-made")
    shutil.rmtree(made, ignore_errors=True)
    write_examples(made / "examples")
    write_reference(made / "reference")
    shutil.copytree(made, sources)
    # The names of pages that are moved or made are known before links are followed.
    for page in OWN:
        place(sources, page).touch()
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
