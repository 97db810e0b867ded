"""Runs the kit on a machine that is lent for minutes and has no network, in commands that do not wait for its parts.

    python3 -m ci.gpu.visit unpack PIECES ... --into FOLDER   # wherever the pieces came in; once
    python3 -m ci.gpu.visit start FOLDER [--out NAME]         # a model; then engines, and whole steps of verl
    python3 -m ci.gpu.visit look FOLDER [--out NAME] [--seconds 60] [--into ARCHIVES]

- `unpack` joins the pieces of `ci.gpu.pack` in FOLDER/site, compiles, and imports what all parts need, which brings the
  files into memory, too. It needs only Python.
- `start` copies the working tree to FOLDER/NAME/repo, so that a later tree does not meet a running part, and leaves its
  parts to a process session of their own. Flash attention is compared while the model is made. The arms of `whole`
  start beside the engines, since they take as long to start as the engines to measure, and make their first step when
  the engines have ended.
- `look` waits until the parts have ended, --seconds at most, prints where all stands, and packs the results in one
  archive. A part that ended leaves a line in `stamps`: seconds since the start, name, exit code.

Invariants (tests/unit/gpu/test_visit.py):
- nothing but Python's own library is imported before unpacking, and a piece that is damaged leaves no site;
- a package that cannot be imported is told with its error;
- no part runs without a model; whole steps begin when the engines have ended, also when these have failed;
- `start` returns while its parts run, and refuses a folder in which parts were started;
- the archive has logs and reports, and neither weights nor the working tree.
"""

import argparse
import json
import lzma
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ci.gpu.pieces import MIB, find, joined

ROOT = Path(__file__).resolve().parents[2]
TREE = ("ci", "patches", "plugins", "recipes", "verl_fuse", "pyproject.toml")
NEEDED = ("torch", "transformers", "vllm")
MADE = {
    "cuda": ["--size", "1.5b", "--prompts", "64", "--tokens", "200"],
    "cpu": ["--size", "tiny", "--prompts", "16", "--tokens", "20"],
}
ATTENTION, MODEL, ENGINE, WHOLE = PARTS = ("attention", "model", "engine", "whole")
# Not worth its bytes in the archive.
HEAVY = ("repo", "*.safetensors", "tokenizer.json", "*.history")
LINES = 6
FAILED = 2


def environment(folder: Path, repo: Path) -> dict[str, str]:
    """Return the variables of a part: the unpacked packages and the working tree come before what is installed."""
    paths = [folder / "site", repo, repo / "plugins", repo / "patches"]
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The pieces have no flashinfer; vLLM samples with its own kernels.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def unpack(pieces: Sequence[Path], folder: Path, needed: Sequence[str] = NEEDED) -> None:
    """Make FOLDER/site from the pieces; a ValueError names damaged pieces, and packages that cannot be imported."""
    begun, site = time.monotonic(), folder / "site"

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    found = find(pieces)
    if site.exists():
        shutil.rmtree(site)
    site.mkdir(parents=True)
    # A mebibyte of pieces may be a hundred mebibytes of zeros: lzma gives them a part at a time, "r|xz" all at once.
    with lzma.open(joined(found)) as content, tarfile.open(fileobj=content, mode="r|") as packed:
        packed.extractall(site, filter="data")
    tell(f"unpacked in {site}")
    workers = str(os.cpu_count() or 1)
    # Files for another Python do not compile, and nobody needs them.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", workers, str(site)], check=False)
    tell("compiled")
    variables = environment(folder, ROOT)
    runs = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"import {name}"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for name in needed
    }
    outputs = {name: run.communicate()[0].decode(errors="replace") for name, run in runs.items()}
    if failed := [name for name, run in runs.items() if run.returncode]:
        raise ValueError("\n".join(f"{name} cannot be imported:\n{outputs[name]}" for name in failed))
    tell(f"{', '.join(needed)} can be imported")


def parts_of(out: Path, device: str, engine: Sequence[str], whole: Sequence[str]) -> dict[str, list[str]]:
    """Return the command of each part."""
    python, on = [sys.executable, "-m"], ["--device", device]
    return {
        ATTENTION: [*python, "ci.gpu.attention", *on],
        MODEL: [*python, "ci.gpu.whole.made", str(out), *MADE[device], *on],
        ENGINE: [*python, "ci.gpu.engine", "--model", f"{out}/model", "--out", f"{out}/engine", *on, *engine],
        WHOLE: [*python, "ci.gpu.whole", "--out", str(out), "--wait", *on, *whole],
    }


def start(folder: Path, out: Path, parts: Mapping[str, Sequence[str]]) -> subprocess.Popen[bytes]:
    """Copy the working tree, leave the parts to a process in a session of its own, and return it."""
    if out.exists():
        raise ValueError(f"{out}: parts were started there; needs another --out")
    (out / "repo").mkdir(parents=True)
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, out / "repo" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, out / "repo" / name)
    (out / "parts.json").write_text(json.dumps(parts))
    with (out / "visit.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ci.gpu.visit", "run", str(folder), "--out", out.name],
            cwd=out / "repo",
            env=environment(folder, out / "repo"),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run(out: Path) -> None:
    """Run the parts in their order; this is what `start` leaves behind."""
    parts, begun = json.loads((out / "parts.json").read_text()), time.monotonic()

    def begin(name: str) -> subprocess.Popen[bytes]:
        with (out / f"{name}.log").open("wb") as log:
            return subprocess.Popen(parts[name], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def end(name: str, process: subprocess.Popen[bytes]) -> int:
        code = process.wait()
        with (out / "stamps").open("a") as file:
            file.write(f"{time.monotonic() - begun:.0f} {name} {code}\n")
        return code

    attention, model = begin(ATTENTION), begin(MODEL)
    made = end(MODEL, model) == 0
    end(ATTENTION, attention)
    if made:
        engine, whole = begin(ENGINE), begin(WHOLE)
        end(ENGINE, engine)
        (out / "begin").touch()
        end(WHOLE, whole)
    (out / "ended").touch()


def look(out: Path, into: Path, seconds: float = 0.0) -> str:
    """Return where all stands, when the parts have ended or the seconds are over, and write the archive."""
    until = time.monotonic() + seconds
    while not (out / "ended").exists() and time.monotonic() < until:
        time.sleep(0.2)
    stamps = out / "stamps"
    told = [stamps.read_text().rstrip()] if stamps.exists() else []
    told.append("all parts have ended" if (out / "ended").exists() else "parts are running")
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader"]
        told.append(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip())
    # The tables come last: what a caller shows of a long text is its end.
    logs = [*sorted(out.glob("*/*.log")), *(out / f"{name}.log" for name in ("visit", *PARTS))]
    for log in (log for log in logs if log.exists() and log.stat().st_size):
        lines = log.read_text(errors="replace").splitlines()
        kept = lines[-20 if log.parent == out else -LINES :]
        told += [f"== {log.relative_to(out)}, {len(lines)} lines", *(line[:300] for line in kept)]
    into.mkdir(parents=True, exist_ok=True)

    archive = into / f"{out.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        for folder, folders, names in os.walk(out):
            folders[:] = [name for name in folders if not _is_heavy(name)]
            for path in (Path(folder) / name for name in sorted(names) if not _is_heavy(name)):
                # A running part renames and deletes files.
                with suppress(FileNotFoundError):
                    packed.add(path, arcname=str(path.relative_to(out.parent)))
    told.append(f"{archive}: {archive.stat().st_size / MIB:.1f} MiB")
    return "\n".join(told)


def _is_heavy(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in HEAVY)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m ci.gpu.visit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    unpacking = commands.add_parser("unpack", help="make FOLDER/site from the pieces")
    unpacking.add_argument("pieces", type=Path, nargs="+", help="folders in which pieces are")
    unpacking.add_argument("--into", dest="folder", type=Path, required=True)
    others: dict[str, Any] = {
        "start": "leave the parts running",
        "look": "print where they stand, and pack their results",
        "run": "run the parts that `start` left",
    }
    for name, text in others.items():
        others[name] = commands.add_parser(name, help=text)
        others[name].add_argument("folder", type=Path)
        others[name].add_argument("--out", default="out", help="the folder of the results in FOLDER")
    others["start"].add_argument("--device", choices=list(MADE), default="cuda")
    others["start"].add_argument("--engine", default="", help="arguments of ci.gpu.engine, in one string")
    others["start"].add_argument("--whole", default="", help="arguments of ci.gpu.whole, in one string")
    others["look"].add_argument("--seconds", type=float, default=0.0, help="to wait for the end of the parts")
    others["look"].add_argument("--into", type=Path, help="the folder of the archive; FOLDER if it is not given")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    try:
        if options.command == "unpack":
            unpack(options.pieces, folder)
            return 0
        out = folder / options.out
        if options.command == "start":
            own = shlex.split(options.engine), shlex.split(options.whole)
            start(folder, out, parts_of(out, options.device, *own))
        elif options.command == "look":
            print(look(out, options.into or folder, options.seconds))
        else:
            run(out)
    except (OSError, ValueError, tarfile.TarError) as error:
        print(f"ci.gpu.visit {options.command}: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
