"""Measure the cost of judging every contract with upstream: seconds at the start of a run, and of the whole check, each
in a fresh process."""

import json
import statistics
import subprocess
import sys
import time

REPEAT = 5
# The trainer does the same: plugins are loaded by then, and contracts are the cpu platform's, which has the most.
START = (
    "import os, time; os.environ['VERL_PLATFORM'] = 'cpu'; from verl_fuse import plugins; manager = plugins.load();"
    "t = time.perf_counter(); from verl_fuse.host.start.compat.start import require_contracts;"
    "found = require_contracts(manager, {}); print(len(found), time.perf_counter() - t)"
)


def main() -> None:
    starts, checks = [], []
    count = 0
    for _ in range(REPEAT):
        shown = subprocess.run(
            [sys.executable, "-c", START], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.split()
        count = int(shown[0])
        starts.append(float(shown[1]))
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ci.upstream", "check"], check=True, stdout=subprocess.DEVNULL)
        checks.append(time.perf_counter() - begin)
    seconds = {"start": round(statistics.median(starts), 3), "check": round(statistics.median(checks), 3)}
    print(json.dumps({"bench": "contracts", "contracts": count, "seconds": seconds}))


if __name__ == "__main__":
    main()
