"""Brings weights that training workers left in Ray's object store (host/weights/exports.py) to standalone replicas: one
copy per node, whichever replicas are there.

The training ranks do not wait, so a replica that dies or stands still while it loads costs the run no other work.
verl's checkpoint engines for standalone replicas are collectives of both sides, which one dead replica ends for all.

Invariants (tests/integration/test_standalone_run.py):
- a replica loads the same weights that verl's own sync gives the replicas on the training devices: the engine's export,
under the same names;
- a replica that fails, or takes too long, is named, and the others have loaded.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from verl.utils.device import get_device_id

from verl_fuse.host.upstream.death import first_line


def load(replicas: Mapping[int, Any], buckets: Sequence[ray.ObjectRef], version: int, timeout: float) -> dict[int, str]:
    """Let each replica (by rank) load the weights of step `version`, all at once, from the `buckets` that
    were left; return the reasons of replicas that did not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    offered = {
        worker.__ray_call__.remote(_offer, buckets): (rank, worker)
        for rank, replica in replicas.items()
        for worker in replica.workers
    }
    failed = _failed({call: rank for call, (rank, _) in offered.items()}, timeout, timeout)
    # A worker runs two calls in any order: a load before the offer would find the weights of the step before, used up.
    loading = {
        worker.update_weights.remote(global_steps=version): rank
        for rank, worker in offered.values()
        if rank not in failed
    }
    return failed | _failed(loading, max(0.0, deadline - time.monotonic()), timeout)


def _failed(calls: Mapping[ray.ObjectRef, int], seconds: float, timeout: float) -> dict[int, str]:
    """Wait `seconds` for the calls; return the reasons of the ranks of which a call failed or has not ended."""
    finished, late = ray.wait(list(calls), num_returns=len(calls), timeout=seconds) if calls else ([], [])
    failed = {calls[call]: f"did not load its weights in {timeout:g} s (fuse.weight_sync_timeout)" for call in late}
    for call in finished:
        try:
            ray.get(call)
        except RayError as error:
            failed[calls[call]] = f"did not load its weights: {first_line(error)}"
    return failed


def _offer(worker: Any, buckets: Sequence[ray.ObjectRef]) -> None:
    """Set the weights that the next `update_weights` of a replica's CheckpointEngineWorker hands to the engine. Runs
    inside that worker."""
    worker.checkpoint_engine.send_weights(_parameters(buckets))


def _parameters(buckets: Sequence[ray.ObjectRef]) -> Iterator[tuple[str, Any]]:
    # A parameter goes to the device: one larger than verl's bucket is handed to the engine there, by a handle that host
    # memory does not have.
    for bucket in buckets:
        for shard in ray.get(bucket):
            # A host needs a copy too: objects in the store are read-only.
            yield shard.name, shard.data.to(get_device_id(), copy=True)
