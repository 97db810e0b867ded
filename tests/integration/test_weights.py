"""Parameters go from training ranks to slices that are sharded otherwise: real FSDP2 modules in processes of
their own, no object store."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    # Importing verl takes seconds, and only the other processes need it.
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed"),
]

# Argument: a folder. Two ranks shard a module over both, or over one of two replicas; then each of them is a slice of
# its own, and then both are one.
SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from verl_fuse.host.weights.buckets import own_shards, take_over

rank, folder = int(sys.argv[2]), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

def module(seed, mesh):
    torch.manual_seed(seed)
    # Rows that do not divide by two, a bias shorter than the ranks, a buffer.
    built = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1), torch.nn.BatchNorm1d(1))
    whole = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    for layer in built:
        fully_shard(layer, mesh=mesh)
    return fully_shard(built, mesh=mesh), whole

def whole(state):
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}

both = init_device_mesh("cpu", (2,))
alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("one", "alone"))["alone"]
twice = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
for source in (both, twice):
    trained, values = module(1, source)
    shards = list(own_shards(trained.state_dict()))
    gathered = [None, None]
    dist.all_gather_object(gathered, shards)
    left = sum(shard.data.numel() for part in gathered for shard in part)
    assert left == sum(tensor.numel() for tensor in values.values()), "each element once"
    for target in (both, alone):
        slice, before = module(2, target)
        slice(torch.ones(2, 3))  # leaves the root's parameters gathered
        take_over(slice.state_dict(), [shard for part in gathered for shard in part])
        found = whole(slice.state_dict())
        assert all(torch.equal(found[name], values[name]) for name in values), (source, target)
        assert not torch.equal(found["0.weight"], before["0.weight"])
    state = slice.state_dict()
    for shards, fault in (
        ([s for s in gathered[0] + gathered[1] if s.name != "0.bias"], "1 parameters were not exported as a whole, "
         "first '0.bias' (5"),
        ([s for s in gathered[0] + gathered[1] if s.name != "1.bias"], "first '1.bias' (1 elements)"),
    ):
        try:
            take_over(state, shards)
        except Exception as error:
            assert fault in str(error), error
        else:
            raise AssertionError(fault)
    del state["2.bias"]
    try:
        take_over(state, gathered[0] + gathered[1])
    except Exception as error:
        assert "it has no parameter '2.bias'" in str(error), error
    else:
        raise AssertionError("a parameter too many")
dist.destroy_process_group()
print("equal")
"""


def test_slices_take_over_the_parameters_however_both_sides_are_sharded(tmp_path: Path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), str(rank)], stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=300)
        assert out.strip().endswith("equal"), err[-3000:]
