"""Pin each rollout replica to one core, so that replicas do not compete for resources that GPUs would not share."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_fuse.host.upstream.vllm import engine_processes


def processes(server: Any) -> list[int]:
    """Return, inside a rollout server, the pids of its own process and of vLLM's engine."""
    return [os.getpid(), *(process.pid for process in engine_processes(server))]


def pin(pids: Iterable[int], core: int) -> None:
    """Put every thread of these processes on one core."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def pin_replicas(trainer: Any) -> list[int]:
    """Pin replica r to core r of the cores that this process may use; return these cores."""
    import ray

    cores = sorted(os.sched_getaffinity(0))
    for replica in trainer.llm_server_manager.get_replicas():
        pin(ray.get(replica.servers[0].__ray_call__.remote(processes)), cores[replica.replica_rank])
    return cores


def pin_ranks(groups: Iterable[Any], cores: list[int]) -> None:
    """Pin rank r of each worker group to core r of `cores`."""
    import ray

    for group in groups:
        for rank, worker in enumerate(group.workers):
            pin([ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))], cores[rank])
