"""Shards of a trained model are read only once they have arrived in host memory, and cast where they go to."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
from torch.overrides import TorchFunctionMode

from verl_fuse.runtime.reshard.messages import _beside
from verl_fuse_realloc.sync import trained


@pytest.mark.parametrize("offloaded", [True, False])
def test_copies_to_the_host_are_waited_for_before_the_first_shard_is_read(monkeypatch, offloaded: bool):
    calls = []

    class Sharded:
        def to_local(self):
            calls.append("read")
            return torch.ones(2)

    device = SimpleNamespace(synchronize=lambda number: calls.append(number))
    monkeypatch.setattr(trained, "get_torch_device", lambda: device)
    monkeypatch.setattr(trained, "is_megatron", lambda engine: False)
    module = SimpleNamespace(state_dict=lambda: {"a": Sharded(), "b": Sharded()})
    found = trained.own_shards(SimpleNamespace(module=module, is_param_offload_enabled=offloaded), 3)
    assert list(found) == ["a", "b"]
    assert calls == [*([3] if offloaded else []), "read", "read"]


def test_a_tensor_goes_to_another_device_in_its_own_dtype():
    seen = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            if function is torch.Tensor.copy_:
                seen.append([(str(each.device), each.dtype) for each in arguments[:2]])
            return function(*arguments, **(options or {}))

    there = torch.empty(3, dtype=torch.bfloat16, device="meta")
    with Seen():
        there.copy_(_beside(torch.ones(3), there))
    assert seen == [[("meta", torch.bfloat16), ("meta", torch.float32)]]
    here = torch.ones(3)
    assert _beside(here, torch.empty(3, dtype=torch.bfloat16)) is here
