"""The memory that a released slice keeps on its device: FSDP2 and FSDP1 on one gloo process, no engine."""

import logging
import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

    from verl_fuse_interstage.slices import device_weights
    from verl_fuse_interstage.slices.device_weights import DeviceWeights
    from verl_fuse_interstage.slices.sharded import FlatShards


class InHost(torch.Tensor):
    """A shard whose copy on a device is another tensor, as a GPU's is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            return args[0].as_subclass(torch.Tensor).clone()
        return super().__torch_function__(func, types, args, kwargs or {})


def fsdp2(built):
    mesh, policy = init_device_mesh("cpu", (1,)), CPUOffloadPolicy(pin_memory=False)
    fully_shard(built[0], mesh=mesh, offload_policy=policy)
    return fully_shard(built, mesh=mesh, offload_policy=policy)


def fsdp1(built, **more):
    settings = {"device_id": torch.device("cpu"), "cpu_offload": CPUOffload(offload_params=True), **more}
    built[0] = FullyShardedDataParallel(built[0], **settings)
    return FullyShardedDataParallel(built, **settings)


KINDS = {"fsdp2": fsdp2, "fsdp1": fsdp1, "fsdp1 of parameters": lambda built: fsdp1(built, use_orig_params=True)}


@pytest.fixture(params=KINDS)
def module(tmp_path, monkeypatch, request):
    # verl takes a process without its cpu platform for one with a GPU.
    monkeypatch.setattr(device_weights, "get_torch_device", lambda: torch.cpu)
    # Nothing can be pinned without one.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with warnings.catch_warnings():
        # One rank has nothing to shard.
        warnings.simplefilter("ignore")
        yield KINDS[request.param](torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)))
    torch.distributed.destroy_process_group()


def test_released_weights_are_those_in_host_memory_and_nothing_stays_gathered(module):
    weights = DeviceWeights(SimpleNamespace(module=module), "ref")
    assert weights.nbytes == sum(tensor.nbytes for tensor in weights.shards.tensors)
    # FSDP1 aligns parameters in its flat one.
    assert 4 * (3 * 5 + 5 + 5 + 1) <= weights.nbytes <= 120
    before = weights.shards.tensors
    weights.load()
    if isinstance(weights.shards, FlatShards):
        assert not any(handle._offload_params for handle in weights.shards.handles), "or FSDP1 wants host memory"
    module(torch.ones(2, 3))
    weights.release()
    weights.release()
    assert all(a is b for a, b in zip(before, weights.shards.tensors, strict=True))
    if isinstance(weights.shards, FlatShards):
        assert all(
            handle.flat_param.data_ptr() == b.data_ptr()
            for handle, b in zip(weights.shards.handles, before, strict=True)
        )
        assert all(handle._offload_params for handle in weights.shards.handles), "as verl has built it"
    else:
        assert {shard.sharded_state.name for shard in weights.shards.parameters} == {"SHARDED"}


def test_the_first_forward_pass_of_all_computes_with_what_is_on_the_device(module):
    weights = DeviceWeights(SimpleNamespace(module=module), "ref")
    # Of FSDP1's, its host memory is what it copies before each pass.
    weights.shards.place([tensor.as_subclass(InHost) for tensor in weights.shards.tensors], offloaded=True)
    weights.load()
    on_device = weights.shards.tensors
    for data in on_device:
        data.fill_(1.0)
    with torch.no_grad():
        assert module(torch.ones(1, 3)).item() == 5 * (3 + 1) + 1
        assert module(torch.ones(1, 3)).item() == 5 * (3 + 1) + 1
    assert all(a is b for a, b in zip(weights.shards.tensors, on_device, strict=True))
    weights.release()
    with torch.no_grad():
        assert module(torch.ones(1, 3)).item() != 5 * (3 + 1) + 1


def test_new_weights_are_computed_with_once_released(module):
    weights = DeviceWeights(SimpleNamespace(module=module), "ref")
    weights.load()
    weights.release()
    with torch.no_grad():
        for tensor in weights.shards.tensors:
            tensor.fill_(1.0)
    weights.load()
    with torch.no_grad():
        assert module(torch.ones(1, 3)).item() == 5 * (3 + 1) + 1


@pytest.mark.parametrize(("free", "held"), [(207, False), (208, True)])
def test_weights_stay_in_host_memory_where_they_would_leave_less_than_they_take(monkeypatch, caplog, free, held):
    """These shards claim a GPU as their device, where `to` would fail on this machine."""
    device = SimpleNamespace(mem_get_info=lambda: (free, 10 * free), synchronize=lambda: None)
    monkeypatch.setattr(device_weights, "get_torch_device", lambda: device)
    copied = []

    class Shard(SimpleNamespace):
        def to(self, device, non_blocking):
            copied.append(self.nbytes)
            return self

    shards = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        tensors=[Shard(nbytes=52), Shard(nbytes=52)],
        reshard=lambda: None,
        place=lambda tensors, offloaded: None,
    )
    monkeypatch.setattr(device_weights, "shards_of", lambda module: shards)
    weights = DeviceWeights(SimpleNamespace(module=None), "'ref' on slice 0")
    with caplog.at_level(logging.WARNING):
        weights.load()
        weights.load()
    assert copied == ([52, 52] if held else [])
    said = [record.getMessage() for record in caplog.records]
    assert [line.startswith("slice: weights of 'ref' on slice 0 (104 bytes) stay in host memory") for line in said] == (
        [] if held else [True]
    )
