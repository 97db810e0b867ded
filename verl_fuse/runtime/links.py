"""Opens the process groups of pipelines: one per pipeline and direction of travel, so that no message waits behind
another pipeline's.

On NCCL a group serialises the messages between two ranks; traffic of both directions, or of two pipelines, in
one group could deadlock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl_fuse.errors import FuseError
from verl_fuse.runtime.gloo import GlooPort
from verl_fuse.runtime.nccl import NcclPort
from verl_fuse.runtime.port import Port
from verl_fuse.spec.schedule import OpKind

# A receive posted at the start of a program may be matched much later; the executor has its own limit
# on how long it is blocked.
MESSAGE_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class Link:
    """A rank's place in one pipeline: global ranks in stage order, and the port of each direction
    ("F" onwards, "B" back)."""

    ranks: tuple[int, ...]
    stage: int
    ports: Mapping[OpKind, Port]


def open_links(pipelines: Sequence[Sequence[int]], device: torch.device) -> dict[int, Link]:
    """Return the links of this process by index in `pipelines`, the global ranks of every pipeline in stage order.

    Collective: every process of the default group calls it with the same list, once; links serve any number of
    programs. `device` is where messages live; the group's backend is the default group's for it. Neighbours exchange
    one element, so that NCCL makes their communicators here, in one order, and not at the first use by a program.
    """
    _check_placement(pipelines)
    rank, links = dist.get_rank(), {}
    for index, ranks in enumerate(pipelines):
        groups: dict[OpKind, dist.ProcessGroup] = {}
        for kind in ("F", "B"):
            group: Any = dist.new_group(list(ranks), timeout=MESSAGE_TIMEOUT, group_desc=f"pipeline {index} {kind}")
            if rank in ranks:
                groups[kind] = group
        if groups:
            port = _port_of(ranks, groups["F"], device)
            _connect(tuple(ranks), groups, torch.device("cpu") if port is GlooPort else device)
            members = dist.get_process_group_ranks(groups["F"])
            ports: dict[OpKind, Port] = {kind: port(group, members) for kind, group in groups.items()}
            links[index] = Link(tuple(ranks), list(ranks).index(rank), ports)
    return links


def _check_placement(pipelines: Sequence[Sequence[int]]) -> None:
    world = dist.get_world_size()
    for index, ranks in enumerate(pipelines):
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world)):
            raise FuseError(f"pipeline {index}: ranks={list(ranks)}; needs different ranks out of 0..{world - 1}")


def _port_of(ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> type[GlooPort | NcclPort]:
    """Return the kind of port whose backend carries tensors of `device`."""
    config = dist.get_backend_config(group)
    backend = dict(entry.split(":") for entry in config.split(",")).get(device.type)
    if backend is None:
        raise FuseError(f"pipeline of ranks {list(ranks)}: no backend for {device.type} in {config!r}")
    if backend not in ("gloo", "nccl"):
        raise FuseError(f"backend={backend!r} for {device.type}: pipelines run on gloo and nccl")
    return GlooPort if backend == "gloo" else NcclPort


def _connect(ranks: tuple[int, ...], groups: Mapping[OpKind, dist.ProcessGroup], device: torch.device) -> None:
    """Send one element along the pipeline, then one back."""
    orders: dict[OpKind, tuple[int, ...]] = {"F": ranks, "B": ranks[::-1]}
    element = torch.zeros(1, device=device)
    for kind, order in orders.items():
        place = order.index(dist.get_rank())
        if place > 0:
            dist.recv(element, order[place - 1], group=groups[kind])
        if place + 1 < len(order):
            dist.send(element, order[place + 1], group=groups[kind])
