"""`python -m ci.gpu PART --out FILE` runs one part of the kit on a device; `all --out FOLDER` runs each in a process of
its own."""

import argparse
import importlib
import subprocess
import sys
import time
from pathlib import Path

from ci.gpu.machine import DEVICES, Report, require_device
from verl_fuse.errors import FuseError
from verl_fuse.spec.files import check_writable

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "profile": "times for the cost model",
    "slices": "memory of slices before, in and after a step",
    "speculation": "the kernels of vLLM's rejection sampler: their text, and the distribution they sample",
    "beside": "decoding while a model trains on the same device",
    "executor": "the executor of fused schedules and the transfer of weights",
    "runs": "observe mode, then GRPO with everything",
}
# A command on a lent machine may take ten minutes.
MOST_SECONDS = 9 * 60
REFUSED, FAILED = 2, 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu", description=__doc__)
    listed = "; ".join(f"{name}: {text}" for name, text in PARTS.items())
    parser.add_argument("part", choices=[*PARTS, "all"], help=listed)
    parser.add_argument("--out", type=Path, required=True, help="the report (JSON); with `all` the folder of reports")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds and measure nothing")
    options = parser.parse_args(arguments)
    if options.part == "all":
        return run_all(options.out, options.device, tiny=options.tiny)
    try:
        report = run(options.part, options.out, options.device, tiny=options.tiny)
    except FuseError as error:
        print(f"ci.gpu {options.part}: {error}", file=sys.stderr)
        return REFUSED
    print(f"ci.gpu {options.part} on {report.device}: {report.seconds} s, {options.out}")
    for fault in (faults := report.result.get("faults", [])):
        print(f"ci.gpu {options.part}: {fault}", file=sys.stderr)
    return FAILED if faults else 0


def run(part: str, out: Path, kind: str, *, tiny: bool) -> Report:
    """Run one part and write its report; a FuseError gives the reason why the part cannot run here."""
    device = require_device(kind)
    check_writable(out)
    module = importlib.import_module(f"ci.gpu.parts.{part}")
    begun = time.monotonic()
    result = module.run(device, out, tiny=tiny)
    report = Report.of(part, kind, time.monotonic() - begun, result)
    report.write(out)
    return report


def run_all(folder: Path, kind: str, *, tiny: bool) -> int:
    """Run each part that can run here; return the worst exit code of the parts that were not refused."""
    folder.mkdir(parents=True, exist_ok=True)
    worst = 0
    for part in PARTS:
        command = [sys.executable, "-m", "ci.gpu", part, "--device", kind, "--out", str(folder / f"{part}.json")]
        command += ["--tiny"] if tiny else []
        try:
            code = subprocess.run(
                command, cwd=ROOT, timeout=MOST_SECONDS if kind == "cuda" else None, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"ci.gpu {part}: took more than {MOST_SECONDS} s", file=sys.stderr)
            code = FAILED
        worst = worst if code == REFUSED else max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
