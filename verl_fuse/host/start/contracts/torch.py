"""Declares contracts on private parts of torch: the store of the default process group (weights/layouts/worker.py,
weights/sync/hybrid.py, update/megatron/fusion.py), a shard's place in its tensor (weights/buckets.py), tensors made of
other tensors (runtime/meter.py)."""

from verl_fuse.spec.contract import Contract, names

CONTRACTS: tuple[Contract, ...] = (
    *names("torch.distributed.distributed_c10d", "_get_default_store"),
    *names("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset"),
    *names("torch.utils._python_dispatch", "is_traceable_wrapper_subclass"),
)
