"""The report of a training rank on its memory: stand-ins for engines of FSDP."""

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch

    from verl_fuse.host.weights import memory
    from verl_fuse.host.weights.memory import rank_memory


def engine(*, offload_policy: bool = False, param: bool = False, optimizer: bool = False, stepped: bool = False):
    """FSDP1 over four ranks, of which this one has 8 elements."""
    module = torch.nn.Linear(4, 2, bias=False)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=64))
    return SimpleNamespace(
        module=module,
        optimizer=SimpleNamespace(state={"weight": {}} if stepped else {}),
        device_mesh=SimpleNamespace(size=lambda dimension: 4),
        model_config=SimpleNamespace(hf_config=config, model_type="language_model"),
        is_param_offload_enabled=param,
        is_optimizer_offload_enabled=optimizer,
        _uses_fsdp2_cpu_offload_policy=offload_policy,
    )


@pytest.mark.parametrize(
    ("offloaded", "kept"),
    [
        ({}, 3 * 32),
        ({"param": True}, 2 * 32),
        ({"optimizer": True}, 32),
        ({"param": True, "optimizer": True}, 0),
        ({"offload_policy": True}, 0),
    ],
)
def test_what_is_not_offloaded_stays_on_the_device(monkeypatch, offloaded, kept):
    monkeypatch.setattr(memory, "get_device_name", lambda: "cuda")
    device = SimpleNamespace(mem_get_info=lambda: (1, 80))
    monkeypatch.setattr(memory, "get_torch_device", lambda: device)
    said = rank_memory(engine(**offloaded), "node 0")
    assert (said.node, said.device, said.parameters, said.outputs) == ("node 0", 80, (32,), 64)
    assert (said.shard, said.kept, said.awaited) == (32, kept, 0 if kept > 32 else 64)


def test_moments_that_are_there_are_not_awaited(monkeypatch):
    """Where the device is the host they are host memory; a copy for inference has none."""
    monkeypatch.setattr(memory, "get_device_name", lambda: "cpu")
    trained = engine()
    said = rank_memory(trained, "node 0")
    assert (said.device, said.kept, said.awaited) == (None, 32, 64)
    assert rank_memory(engine(stepped=True), "node 0").awaited == 0
    trained.optimizer = None
    assert (rank_memory(trained, "node 0").kept, rank_memory(trained, "node 0").awaited) == (32, 0)


def test_only_what_is_trained_has_moments(monkeypatch):
    monkeypatch.setattr(memory, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(memory, "get_torch_device", lambda: SimpleNamespace(mem_get_info=lambda: (1, 80)))
    adapted = engine()
    adapted.module = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 3, bias=False))
    adapted.module[0].weight.requires_grad_(False)
    assert rank_memory(adapted, "node 0").kept == 32 + 3 * 24


@pytest.mark.parametrize(
    ("offloaded", "on_host", "kept", "awaited", "comes"),
    [
        # 8 parameters of 2 bytes with gradients of 4; the optimizer owns 4 of them in float32, with two moments.
        ({}, False, 48 + 48, 0, 0),
        ({"param": True}, False, 48, 0, 48),
        ({"optimizer": True}, False, 48, 32, 48),
        ({"param": True, "optimizer": True}, False, 0, 32, 96),
        ({"optimizer": True, "stepped": True}, False, 48, 0, 48),
        ({}, True, 48, 32, 0),
    ],
)
def test_what_a_megatron_engine_does_not_offload_stays_on_the_device(offloaded, on_host, kept, awaited, comes):
    with warnings.catch_warnings():
        # Megatron says what it falls back to.
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        from verl_fuse.host.weights.megatron_memory import _trained, offloaded_bytes

    chunk = torch.nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)
    chunk.buffers = [SimpleNamespace(grad_data=torch.zeros(8))]
    chunk.expert_parallel_buffers = []
    trained = engine(**offloaded)
    trained.module = [chunk]
    trained.optimizer.param_groups = [{"params": [torch.zeros(4)]}]
    assert _trained(trained, 16, on_host) == (kept, awaited)
    assert offloaded_bytes(trained) == comes
