"""The platform `cpu` gives verl virtual devices in place of accelerators.

Ray is told that the host has N GPUs (`ray_kwargs.ray_init.num_gpus=N`), so verl's placement groups, visible devices and
replica layout work as they are. Each worker process sees one device, the host, and speaks gloo.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_fuse_cpu import device


class DeviceId(str):
    """The device "cpu", which formats as "0": verl uses one id both as a device, `tensor.to(id)`, and as an index,
    `f"{name}:{id}"`."""

    __slots__ = ()

    def __new__(cls) -> "DeviceId":
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return format("0", spec)

    def __int__(self) -> int:
        return 0

    def __reduce__(self) -> tuple[type["DeviceId"], tuple[()]]:
        return DeviceId, ()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The host as a set of virtual devices, used only when VERL_PLATFORM=cpu names it."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return DeviceId()

    def device_count(self) -> int:
        return device.device_count()

    def set_device(self, device_index: int) -> None:
        device.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: every operation on the host has finished when the operation returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the host's allocator has none of these settings."""

    def empty_cache(self) -> None:
        device.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        # Ray sets this variable for its GPU resource; builds without CUDA ignore the variable.
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        # Weights then travel through /dev/shm (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py).
        return False

    def cudart(self) -> None:
        """Return None: there is no CUDA runtime."""
