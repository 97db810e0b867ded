"""Read the plan that a bench whose arms take turns gives the processes of its run: $BENCH_PLAN names a JSON file."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any


@cache
def plan() -> dict[str, Any]:
    """Return `arms` by step, response `lengths` by step group and sample, samples per prompt, and the file for
    `measurements`."""
    return json.loads(Path(os.environ["BENCH_PLAN"]).read_text())


def arm(step: int) -> str:
    """Return the arm that step `step` (from 1) runs."""
    return plan()["arms"][step - 1]


def group(step: int) -> int:
    """Return the step group of step `step`; a step group runs every arm once."""
    return (step - 1) // plan()["arms_per_group"]


def length(step: int, prompt: int, session: int) -> int:
    """Return the tokens of a sample: all arms of a step group generate the same lengths."""
    return plan()["lengths"][group(step)][prompt * plan()["samples_per_prompt"] + session]
