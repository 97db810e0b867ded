"""`python -m ci.bench [NAME]` runs every benchmark, or one, each in a process of its own."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def names() -> list[str]:
    """Return the names of the benchmarks of this folder."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
        if module.name != "__main__" and not module.ispkg
    )


def run(name: str) -> str | None:
    """Run one benchmark and show its output; return a description of its fault, or None."""
    process = subprocess.run([sys.executable, "-m", f"ci.bench.{name}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(process.stdout, end="", flush=True)
    if process.returncode:
        return f"{name}: exit code {process.returncode}"
    last = (process.stdout.splitlines() or [""])[-1]
    try:
        fits = isinstance(json.loads(last), dict)
    except json.JSONDecodeError:
        fits = False
    return None if fits else f"{name}: the last line is not a JSON object: {last!r}"


def main(wanted: list[str]) -> int:
    unknown = sorted(set(wanted) - set(names()))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(names())}", file=sys.stderr)
        return 2
    faults = [fault for name in wanted or names() if (fault := run(name))]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
