"""Draw ladders: ratios of whole steps, one feature after the other."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def draw(cases: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the ladder of each case, a panel of bars with their intervals, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    height = max(len(found["ladder"]) for found in cases)
    figure, panels = pyplot.subplots(1, len(cases), figsize=(2.6 * len(cases), 0.45 * height + 1), squeeze=False)
    for panel, found in zip(panels[0], cases, strict=True):
        rungs = list(found["ladder"])
        values = [found["ladder"][rung]["ratio"] for rung in rungs]
        low, high = zip(*(found["ladder"][rung]["interval"] for rung in rungs), strict=True)
        reach = [np.maximum(0.0, np.subtract(values, low)), np.maximum(0.0, np.subtract(high, values))]
        bars = panel.barh(rungs, values, xerr=reach, color="#4c72b0", ecolor="grey")
        panel.bar_label(bars, [f"{value:.2f}" for value in values], padding=2)
        panel.axvline(1.0, color="grey", linewidth=0.8)
        panel.set(title=found["case"], xlim=(0, 1.25 * max(high)), xlabel="stock / ours")
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    part = file.with_name(f"{file.name}.part")
    figure.savefig(part, format="svg", metadata={"Date": None})
    part.rename(file)
