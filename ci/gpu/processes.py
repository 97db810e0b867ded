"""Start the ranks of a process group, one process each: all on one device, or each on its own."""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from verl_fuse.errors import FuseError

TIMEOUT = timedelta(seconds=120)
# Ranks that NCCL leaves waiting for each other do not end by themselves.
MOST_SECONDS = 300.0


@dataclass(frozen=True)
class Rank:
    """One process of `size`: the device of its tensors, and the store of all processes."""

    number: int
    size: int
    device: torch.device
    store: Any


def on_ranks(size: int, backend: str, kind: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return `function(rank, *arguments)` of every rank; with several devices each rank has its own. A FuseError has
    the first error, shortened."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    results = context.SimpleQueue()
    asked = (size, backend, kind, store.port, results, function, arguments)
    processes = [context.Process(target=_serve, args=(number, *asked), daemon=True) for number in range(size)]
    for process in processes:
        process.start()
    try:
        return _gathered(results, processes)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _gathered(results: Any, processes: list[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + MOST_SECONDS
    while len(found) < len(processes):
        if not results._reader.poll(1.0):
            if dead := [p for n, p in enumerate(processes) if n not in found and p.exitcode not in (None, 0)]:
                raise FuseError(f"a rank ended with exit code {dead[0].exitcode}")
            if time.monotonic() > deadline:
                raise FuseError(
                    f"ranks {sorted(set(range(len(processes))) - set(found))} did not end in {MOST_SECONDS:g} s"
                )
            continue
        number, value, error = results.get()
        if error:
            raise FuseError(f"rank {number}: {error}")
        found[number] = value
    return [found[number] for number in range(len(processes))]


def _serve(
    number: int, size: int, backend: str, kind: str, port: int, results: Any, function: Any, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        device = torch.device(kind, number % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        store = TCPStore("127.0.0.1", port, None, False, TIMEOUT)
        # Both backends are needed: tensors on the host go over gloo.
        groups = f"cpu:gloo,cuda:{backend}" if kind == "cuda" else backend
        dist.init_process_group(
            groups, store=PrefixStore("group", store), rank=number, world_size=size, timeout=TIMEOUT
        )
        value = function(Rank(number, size, device, store), *arguments)
        dist.destroy_process_group()
        results.put((number, value, ""))
    except Exception as error:  # noqa: BLE001  the caller gets the error
        traceback.print_exc()
        results.put((number, None, f"{type(error).__name__}: {str(error)[:500]}"))
