"""Measure the cost of an installed verl-fuse: seconds to import its entry points, beside verl itself, each in a fresh
process."""

import json
import statistics
import subprocess
import sys

REPEAT = 5
PROBE = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
MODULES = ("verl_fuse.host.entry", "verl_fuse_cpu.entry", "verl_fuse.plugins", "verl_fuse.cli", "verl")


def seconds(module: str) -> float:
    """Return the median wall seconds of a first import."""
    command = [sys.executable, "-c", PROBE.format(module)]
    runs = [subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout for _ in range(REPEAT)]
    return statistics.median(float(shown.splitlines()[-1]) for shown in runs)


if __name__ == "__main__":
    print(json.dumps({"bench": "imports", "seconds": {module: round(seconds(module), 4) for module in MODULES}}))
