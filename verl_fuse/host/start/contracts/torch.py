"""Declares contracts on private parts of torch: the store of the default process group (weights/layouts/worker.py,
weights/sync/hybrid.py, update/megatron/fusion.py), a shard's place in its tensor (weights/buckets.py), tensors made of
other tensors (runtime/meter.py)."""

from verl_fuse.spec.contract import Contract, Function

CONTRACTS: tuple[Contract, ...] = (
    Function("torch.distributed.distributed_c10d:_get_default_store", "()", "4175a1c4c94a5d70"),
    Function(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        "(global_shape, mesh, placements, skip_offset=False)",
        "d4738fdb1af9925a",
    ),
    Function(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass", "(t)", ("39e226bc4e7eb783", "1b916cd5d1aac20d")
    ),
)
