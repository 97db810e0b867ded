"""(e) Runs the executor of fused schedules and transfers of weights on one device.

The part runs one rank with the device's own backend (NCCL), two ranks whose tensors live on the device with gloo
between them, and records NCCL's answer to two ranks on one device: NCCL serves one rank per device, so messages over
NCCL need two devices (`python -m ci.gpu.devices`).
"""

from pathlib import Path
from typing import Any

import torch

from ci.gpu.layouts import LAYOUTS
from ci.gpu.processes import on_ranks
from ci.gpu.programs import checked, different_ranks
from verl_fuse.errors import FuseError

WIDTH = {"cuda": 4096, "cpu": 128}


def run(device: torch.device, out: Path, *, tiny: bool) -> dict[str, Any]:
    kind, width = device.type, 8 if tiny else WIDTH[device.type]
    own = "nccl" if kind == "cuda" else "gloo"
    found: dict[str, Any] = {}
    faults = []
    for name, size, backend in ((f"one rank, {own}", 1, own), ("two ranks, gloo", 2, "gloo")):
        found[name] = on_ranks(size, backend, kind, checked, backend, width, LAYOUTS[size])
        faults += [f"{name}: {fault}" for fault in different_ranks(found[name])]
    if kind == "cuda" and torch.cuda.device_count() == 1:
        found["two ranks, nccl"] = _answer(width)
    return {**found, "faults": faults}


def _answer(width: int) -> str:
    try:
        on_ranks(2, "nccl", "cuda", checked, "nccl", width, LAYOUTS[2])
    except FuseError as error:
        return str(error)
    return "runs"
