"""How the Megatron copies of a slice are cut, and where their weights are. No engine, no ranks."""

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch

    from verl_fuse.errors import FuseError
    from verl_fuse_interstage.slices import megatron_copies
    from verl_fuse_interstage.slices.megatron_copies import MegatronWeights, copy_settings


def block(tensor: int, pipeline: int) -> dict[str, int]:
    return {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}


@pytest.mark.parametrize(
    ("devices", "trained", "pipeline"),
    [
        (1, [block(1, 4)], 1),
        (2, [block(2, 4)], 1),
        (4, [block(2, 4)], 2),
        (8, [block(2, 2)], 2),
        # Actor and critic have one parallel state.
        (8, [block(1, 4), block(1, 2)], 2),
        (6, [block(1, 4), block(1, 4)], 2),
        (4, [{}], 1),
    ],
)
def test_a_copy_has_the_largest_pipeline_that_fits_its_devices_and_all_models(devices, trained, pipeline):
    found = copy_settings(trained, devices)
    assert found["pipeline_model_parallel_size"] == pipeline
    assert "tensor_model_parallel_size" not in found
    assert (found["forward_only"], found["param_offload"], found["expert_model_parallel_size"]) == (True, False, 1)


@pytest.fixture
def weights(monkeypatch):
    """Of a model on a device that has `free` bytes; what is on it is a copy."""

    def build(free: int) -> tuple[MegatronWeights, torch.nn.Module]:
        device = SimpleNamespace(mem_get_info=lambda: (free, 0), synchronize=lambda: None)
        monkeypatch.setattr(megatron_copies, "get_torch_device", lambda: device)
        monkeypatch.setattr(megatron_copies, "get_device_name", lambda: "accelerator")
        monkeypatch.setattr(megatron_copies, "get_device_id", lambda: torch.float64)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        module = torch.nn.Linear(3, 5)
        return MegatronWeights(SimpleNamespace(module=[module]), "'ref' on slice 0"), module

    return build


def test_weights_are_on_the_device_from_load_to_release_and_nothing_is_copied_back(weights):
    held, module = weights(10**6)
    assert held.nbytes == 4 * (3 * 5 + 5)
    held.load()
    # A device is another dtype here.
    assert module.weight.dtype == torch.float64
    with torch.no_grad():
        module.weight.fill_(7)
    held.release()
    assert module.weight.dtype == torch.float32
    assert not (module.weight == 7).any()
    with torch.no_grad():
        module.weight.fill_(3)
    held.load()
    assert (module.weight == 3).all(), "what was taken over in host memory"


def test_weights_without_room_end_the_run_with_their_bytes(weights):
    held, _ = weights(79)
    with pytest.raises(
        FuseError, match="weights of 'ref' on slice 0 need 80 bytes of the device, of which 79 are free"
    ):
        held.load()
