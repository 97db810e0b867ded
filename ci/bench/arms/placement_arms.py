"""This external module of the bench `placement`, the same in every run, forces lengths and measures whole steps like
`step_arms`. The records have also the seconds for which cores of the machine were idle while the step generated."""

import importlib
import threading
import time
from typing import Any

import numpy as np
import psutil
import step_arms  # measures, and pins devices

from verl_fuse.host.upstream.on_import import on_import


def _register_agent(module: Any) -> None:
    # Hydra looks the agent up by its module and name.
    importlib.import_module("heavy_tail_agent")


class _Idle:
    """Looks at the idle seconds of all cores, twenty times a second."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, float]] = []
        threading.Thread(target=self._look, daemon=True).start()

    def between(self, begin: float, end: float) -> float:
        """Return the idle core seconds between two moments of the monotonic clock."""
        times, idle = np.array(list(self._looks)).T
        first, last = np.interp([begin, end], times, idle)
        return float(last - first)

    def _look(self) -> None:
        while True:
            self._looks.append((time.monotonic(), psutil.cpu_times().idle))
            time.sleep(0.05)


def _with_idle() -> None:
    record, idle = step_arms._record, _Idle()

    def recorded(batch: Any, metrics: dict, trainer: Any, seconds: float) -> dict[str, Any]:
        found = record(batch, metrics, trainer, seconds)
        # Generation is the first stage of a step.
        begun = time.monotonic() - seconds
        return {**found, "idle": idle.between(begun, begun + found["parts"]["gen"])}

    step_arms._record = recorded


_with_idle()
on_import("verl.experimental.agent_loop", _register_agent)
