"""`python -m ci.gpu.devices --size 2 --out FILE` runs transfers between layouts, weight sync by shards and a fused
program over several devices, with NCCL.

With `--device cpu` the same ranks are processes with gloo between them.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from ci.gpu.layouts import LAYOUTS
from ci.gpu.machine import DEVICES, Report, require_device
from ci.gpu.processes import on_ranks
from ci.gpu.programs import checked, different_ranks
from verl_fuse.errors import FuseError
from verl_fuse.spec.files import check_writable

WIDTH = {"cuda": 4096, "cpu": 64}
REFUSED, FAILED = 2, 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.devices", description=__doc__)
    parser.add_argument("--size", type=int, choices=[size for size in LAYOUTS if size > 1], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    options = parser.parse_args(arguments)
    try:
        report = run(options.size, options.out, options.device)
    except FuseError as error:
        print(f"ci.gpu.devices: {error}", file=sys.stderr)
        return REFUSED
    for fault in report.result["faults"]:
        print(f"ci.gpu.devices: {fault}", file=sys.stderr)
    print(f"ci.gpu.devices on {options.size} x {report.device}: {report.seconds} s, {options.out}")
    return FAILED if report.result["faults"] else 0


def run(size: int, out: Path, kind: str) -> Report:
    require_device(kind)
    check_writable(out)
    if kind == "cuda" and torch.cuda.device_count() < size:
        raise FuseError(f"--size={size}: this machine has {torch.cuda.device_count()} CUDA devices")
    backend, begun = "nccl" if kind == "cuda" else "gloo", time.monotonic()
    found = on_ranks(size, backend, kind, checked, backend, WIDTH[kind], LAYOUTS[size])
    result = {"backend": backend, "ranks": found, "faults": different_ranks(found)}
    report = Report.of(f"devices {size}", kind, time.monotonic() - begun, result)
    report.write(out)
    return report


if __name__ == "__main__":
    sys.exit(main())
