"""Tells how verl cuts a batch over the ranks of a worker group."""

from typing import Any


def data_parallel_size(worker_group: Any, mesh: str) -> int:
    """Return the number of parts that a batch dispatched over `mesh` is cut into."""
    if mesh not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh] = worker_group._query_dispatch_info(mesh)
    return max(worker_group._dispatch_info[mesh]) + 1
