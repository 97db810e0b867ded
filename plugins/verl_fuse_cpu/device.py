"""Lets the device module of the cpu platform answer for the host the functions that verl calls on `torch.cuda`.

A process sees one device. Its memory is the process's resident memory, and its free memory is the host's available
memory. Streams, events and all other names are torch.cpu's own.
"""

import resource
from typing import Any

import psutil
import torch
from torch import Tensor


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: object) -> None:
    """Do nothing: there is one device."""


def get_device_name(device: object = None) -> str:
    return "CPU"


def empty_cache() -> None:
    """Do nothing: the host's allocator keeps no cache of its own."""


def memory_allocated(device: object = None) -> int:
    return psutil.Process().memory_info().rss


def max_memory_allocated(device: object = None) -> int:
    # Linux counts the peak in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(device: object = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    """Do nothing: the host does not divide its memory among processes."""


def get_rng_state(device: object = None) -> Tensor:
    return torch.get_rng_state()


def set_rng_state(state: Tensor, device: object = None) -> None:
    torch.set_rng_state(state)
