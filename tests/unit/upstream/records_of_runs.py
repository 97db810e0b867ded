"""Step records of real runs, cut short to a few rows and parameters of five steps."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from ci.upstream.ab.record import Record, Step

RECORDS = Path(__file__).parent / "records"


def load(name: str) -> Record:
    """The record of that name: stock, observe or streaming."""
    data = json.loads((RECORDS / f"{name}.json").read_text())
    steps = {
        int(number): Step(
            step["replayed"],
            step["seconds"],
            step["metrics"],
            {
                quantity: {item: np.asarray(row, dtype=np.float32) for item, row in items.items()}
                for quantity, items in step["numbers"].items()
            },
        )
        for number, step in data["steps"].items()
    }
    return Record(data["name"], data["code"], data["peak_bytes"], steps)


def changed(record: Record, number: int, **fields: object) -> Record:
    """The record with fields of one step replaced; `numbers` and `metrics` are merged."""
    step = record.steps[number]
    merged = {name: {**getattr(step, name), **value} for name, value in fields.items() if isinstance(value, dict)}
    return replace(record, steps={**record.steps, number: replace(step, **{**fields, **merged})})


def slower(record: Record, seconds: float) -> Record:
    """The record with so many seconds added to every step."""
    steps = {number: replace(step, seconds=step.seconds + seconds) for number, step in record.steps.items()}
    return replace(record, steps=steps)
