"""mbridge leaves models on the host when the host is the device.

mbridge moves every model with `Module.cuda`, which knows accelerators only. In a process that trains with mbridge on a
CPU, models stay where they are.
"""

from types import ModuleType

from verl_fuse_patches.registry import Patch


def apply(module: ModuleType) -> None:
    import torch

    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]


PATCH = Patch(
    name="mbridge_device",
    reason="models are moved by Module.cuda",
    upstream="https://github.com/ISEEKYAN/mbridge/blob/main/mbridge/core/util.py",
    target="mbridge.core.util:get_model",
    fingerprints={"==0.15.1": "461103d3c996dee2"},
    remove_when="mbridge moves models by Module.to",
    apply=apply,
)
