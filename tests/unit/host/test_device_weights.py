"""What a slice keeps on its device while it is released: FSDP2 on one gloo process, no accelerator, no engine."""

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
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from verl_fuse.host.inference import device_weights
    from verl_fuse.host.inference.device_weights import DeviceWeights


@pytest.fixture
def module(tmp_path, monkeypatch):
    # verl takes a process without its cpu platform for one with a GPU.
    monkeypatch.setattr(device_weights, "get_torch_device", lambda: torch.cpu)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    built = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    mesh, policy = init_device_mesh("cpu", (1,)), CPUOffloadPolicy(pin_memory=False)
    fully_shard(built[0], mesh=mesh, offload_policy=policy)
    yield fully_shard(built, mesh=mesh, offload_policy=policy)
    torch.distributed.destroy_process_group()


def test_released_weights_are_those_in_host_memory_and_nothing_stays_gathered(module):
    weights = DeviceWeights(SimpleNamespace(module=module), "ref")
    assert weights.nbytes == 4 * (3 * 5 + 5 + 5 + 1)
    before = [shard._sharded_param_data for shard in weights._shards]
    weights.load()
    module(torch.ones(2, 3))
    weights.release()
    weights.release()
    assert all(a is b for a, b in zip(before, (shard._sharded_param_data for shard in weights._shards), strict=True))
    assert {shard.sharded_state.name for shard in weights._shards} == {"SHARDED"}


def test_the_first_forward_pass_of_all_computes_with_what_is_on_the_device(module):
    class InHost(torch.Tensor):
        """A shard whose copy on a device is another tensor, as a GPU's is."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to:
                return args[0].as_subclass(torch.Tensor).clone()
            return super().__torch_function__(func, types, args, kwargs or {})

    weights = DeviceWeights(SimpleNamespace(module=module), "ref")
    for shard in weights._shards:
        shard._sharded_param_data = shard._sharded_param_data.as_subclass(InHost)
    weights.load()
    on_device = [shard._sharded_param_data for shard in weights._shards]
    for data in on_device:
        data.fill_(1.0)
    assert module(torch.ones(1, 3)).item() == 5 * (3 + 1) + 1
    assert all(shard._sharded_param_data is data for shard, data in zip(weights._shards, on_device, strict=True))


def test_new_weights_are_computed_with_once_released(module):
    weights = DeviceWeights(SimpleNamespace(module=module), "ref")
    weights.load()
    weights.release()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.to_local().fill_(1.0)
    weights.load()
    assert module(torch.ones(1, 3)).item() == 5 * (3 + 1) + 1


@pytest.mark.parametrize(("free", "held"), [(207, False), (208, True)])
def test_weights_stay_in_host_memory_where_they_would_leave_less_than_they_take(
    module, monkeypatch, caplog, free, held
):
    """The device of these shards says that it is a GPU, where `to` would fail on this machine."""
    device = SimpleNamespace(mem_get_info=lambda: (free, 10 * free), synchronize=lambda: None)
    monkeypatch.setattr(device_weights, "get_torch_device", lambda: device)
    weights = DeviceWeights(SimpleNamespace(module=module), "'ref' on slice 0")
    copied = []

    class Shard(SimpleNamespace):
        def to(self, device, non_blocking):
            copied.append(self.nbytes)
            return self

    gpu = SimpleNamespace(type="cuda")
    weights._shards = [SimpleNamespace(device=gpu, _sharded_param_data=Shard(nbytes=52)) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        weights.load()
        weights.load()
    assert copied == ([52, 52] if held else [])
    said = [record.getMessage() for record in caplog.records]
    assert [line.startswith("slice: weights of 'ref' on slice 0 (104 bytes) stay in host memory") for line in said] == (
        [] if held else [True]
    )
