"""Slices on FSDP1: a sharded model in processes of its own, whose shards are put on the device once per step."""

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

# Arguments: a folder, the rank of two. In each step other weights are in host memory, and passes compute with them.
SCRIPT = """
import sys, torch
from contextlib import nullcontext
from types import SimpleNamespace
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from verl_fuse_interstage.slices import device_weights
from verl_fuse.host.weights.buckets import export_parameters, load_parameters

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
device_weights.get_torch_device = lambda: torch.cpu
# Nothing can be pinned without an accelerator.
torch.Tensor.pin_memory = lambda tensor: tensor.clone()
moved = []


class InHost(torch.Tensor):
    # A shard in host memory: on a device it is another tensor.
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            moved.append(args[0].nbytes)
            return args[0].as_subclass(torch.Tensor).clone()
        return super().__torch_function__(func, types, args, kwargs or {})


def built(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))


def check(named, dtype):
    settings = {
        "device_id": torch.device("cpu"),
        "cpu_offload": CPUOffload(offload_params=True),
        "use_orig_params": named,
        "mixed_precision": MixedPrecision(param_dtype=dtype),
    }
    module = built(0)
    module[0] = FullyShardedDataParallel(module[0], **settings)
    module = FullyShardedDataParallel(module, **settings).eval()
    weights = device_weights.DeviceWeights(SimpleNamespace(module=module), "ref")
    shards, inputs = weights.shards, torch.ones(2, 3)
    for step in range(3):
        whole = built(step)
        bucket = [SimpleNamespace(name=name, data=tensor.clone()) for name, tensor in whole.state_dict().items()]
        weights.release()
        load_parameters(SimpleNamespace(module=module), [bucket])
        wanted = whole.to(dtype)(inputs.to(dtype))
        shards.place([tensor.as_subclass(InHost) for tensor in shards.tensors], offloaded=True)
        weights.load()
        assert len(moved) == len(shards.handles) == 2, moved
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(module(inputs), wanted), (step, module(inputs), wanted)
        assert len(moved) == 2, "copied for each pass"
        moved.clear()
        weights.release()
        gathered = [handle.flat_param._full_param_padded.untyped_storage().size() for handle in shards.handles]
        assert gathered == [0, 0], gathered
        shards.place([tensor.as_subclass(torch.Tensor) for tensor in shards.tensors], offloaded=True)
        with torch.no_grad():
            assert torch.equal(module(inputs), wanted), "as verl computes it, from host memory"


def leave(named):
    # Of a model that is trained, which is not offloaded.
    whole, settings = built(0), {"device_id": torch.device("cpu"), "use_orig_params": named}
    module = built(0)
    module[0] = FullyShardedDataParallel(module[0], **settings)
    module = FullyShardedDataParallel(module, **settings)
    precision = SimpleNamespace(mixed_precision={"param_dtype": "fp32"})
    engine = SimpleNamespace(module=module, engine_config=precision, eval_mode=nullcontext)
    for _ in range(2):
        left = {shard.name: shard.data for bucket in export_parameters(engine) for shard in bucket}
        assert left.keys() == (whole.state_dict().keys() if rank == 0 else set()), (rank, left.keys())
        assert all(torch.equal(left[name], tensor) for name, tensor in whole.state_dict().items() if rank == 0)
        with torch.no_grad():
            assert torch.equal(module(torch.ones(2, 3)), whole(torch.ones(2, 3)))


for named in (False, True):
    leave(named)
    for dtype in (torch.float32, torch.bfloat16):
        check(named, dtype)
dist.destroy_process_group()
print("equal")
"""


def test_shards_are_copied_to_the_device_once_a_step_and_every_pass_computes_with_them(tmp_path: Path):
    """Flat parameters and those that keep their names, in both dtypes; before that, weights that a trained model leaves
    for slices."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=-1, stderr=-1, text=True) for rank in range(2)]
    for process in ranks:
        out, err = process.communicate(timeout=300)
        assert out.strip().endswith("equal"), err[-3000:]
