"""Tells how much memory this machine, or the container, has free. Needs Linux and Python alone."""

from pathlib import Path


def free_memory(root: Path = Path("/")) -> int:
    """Return the free bytes; of a container (control groups, version 2) what its limit leaves. `root` is /."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    (free,) = (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    limit = root / "sys/fs/cgroup/memory.max"
    if not limit.exists() or (most := limit.read_text().strip()) == "max":
        return free
    statistics = dict(line.split() for line in limit.with_name("memory.stat").read_text().splitlines())
    # The kernel gives up the cache of files when memory is needed.
    used = int(limit.with_name("memory.current").read_text()) - int(statistics["inactive_file"])
    return min(free, int(most) - used)
