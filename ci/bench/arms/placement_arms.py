"""This external module of the bench `placement`, the same in every run, forces lengths and measures whole steps like
`step_arms`. The records have also the seconds for which the second device's core was idle while the step generated."""

import importlib
import os
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
    """Looks at the idle seconds of a core, twenty times a second."""

    def __init__(self, core: int) -> None:
        self._core, self._looks = core, []
        threading.Thread(target=self._look, daemon=True).start()

    def between(self, begin: float, end: float) -> float:
        """Return the idle seconds between two moments of the monotonic clock."""
        times, idle = np.array(list(self._looks)).T
        first, last = np.interp([begin, end], times, idle)
        return float(last - first)

    def _look(self) -> None:
        while True:
            self._looks.append((time.monotonic(), psutil.cpu_times(percpu=True)[self._core].idle))
            time.sleep(0.05)


def _measure_idle(trainer: Any) -> None:
    """Act in the driver alone: this module is imported by every process of the run."""
    record, idle = step_arms._record, _Idle(sorted(os.sched_getaffinity(0))[1])

    def recorded(batch: Any, metrics: dict, trainer: Any, seconds: float) -> dict[str, Any]:
        found = record(batch, metrics, trainer, seconds)
        # Generation is the first stage of a step.
        begun = time.monotonic() - seconds
        return {**found, "idle": idle.between(begun, begun + found["parts"]["gen"])}

    step_arms._record = recorded
    _measure(trainer)


_measure, step_arms._measure_steps = step_arms._measure_steps, _measure_idle
on_import("verl.experimental.agent_loop", _register_agent)
