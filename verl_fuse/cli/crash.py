"""Tells why a run broke off: finds the error that ends the last traceback of its log.

Ray puts the traceback of a process into that of the driver, so the last error is the error that was raised first.
"""

import re
from pathlib import Path

from verl_fuse.cli.screen import last_lines, split

# At most this many lines of one message: an error with many reasons has a line for each.
MOST_LINES = 12
_BEGIN = "Traceback (most recent call last):"
_ERROR = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Died|Failure)\b")
# These texts follow the error: Hydra's advice, and Ray's words about the connection that goes down.
_AFTER = ("Set the environment variable HYDRA_FULL_ERROR", "[")


def cause(log: Path) -> str | None:
    """Return the lines of the final error of the driver's traceback (of any process, if the driver printed none); None
    if there is no traceback."""
    lines = [split(line) for line in last_lines(log, most=2000, size=1 << 20)]
    driver = [text for source, text in lines if not source]
    return _final_error(driver) or _final_error([text for _, text in lines])


def _final_error(lines: list[str]) -> str | None:
    if not any(_BEGIN in line for line in lines):
        return None
    start = next((number for number in reversed(range(len(lines))) if _ERROR.match(lines[number])), None)
    if start is None:
        return None
    rest = lines[start + 1 : start + MOST_LINES]
    end = next((number for number, line in enumerate(rest) if line.startswith(_AFTER)), len(rest))
    return "\n".join([lines[start], *rest[:end]])
