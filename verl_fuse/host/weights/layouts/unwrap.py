"""Takes FSDP2 off a module, for which torch has no call: `fully_shard` may then be applied to the module again.

The module's sharded parameters stay in place, and so do its other additions: verl's patches, checkpointing of
activations.

Invariants (tests/integration/test_changed_layouts.py):
- no trace of FSDP2 is left: the module's class, its hooks and its state dict are the same as before;
- a torch that keeps these things elsewhere is a FuseError of `require_known`, which changes nothing. The code is
written for torch 2.11 and 2.13, whose source was read.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, fully_shard

from verl_fuse.errors import FuseError
from verl_fuse.host.weights.gathered import reshard

# Attributes that FSDP2 leaves on a module it wraps, and the names of its hooks.
_HOOKS = ("_pre_forward_hook_handle", "_post_forward_hook_handle")
_GROUP_HOOKS = ("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle")
_PARAMETER_HOOK = "_post_load_hook_handle"


def wrapped(module: nn.Module) -> list[FSDPModule]:
    """Return the modules within `module`, itself included, that `fully_shard` was applied to."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def state_of(part: Any) -> Any:
    """Return the state that FSDP2 keeps of a module it wraps."""
    return fully_shard.state(part)  # pyright: ignore[reportFunctionMemberAccess]


def require_known(module: nn.Module) -> None:
    """Raise a FuseError unless `unwrap` knows everything that FSDP2 has put on `module`."""
    for part in wrapped(module):
        if not _known(part):
            raise FuseError(
                f"layout change: FSDP2 of torch {torch.__version__} wraps {type(part).__name__} in a way that is not "
                "known here; needs torch 2.11 or 2.13, or no fuse.realloc.schedule"
            )


def unwrap(module: nn.Module) -> None:
    """Undo `fully_shard` on `module`, which `require_known` has passed, and all modules within it."""
    parts: list[Any] = wrapped(module)
    # The sharded parameters are the registered parameters from here on.
    reshard(module)
    for part in parts:
        for hook in _hooks(part):
            hook.remove()
        for key, name in ((STATE_KEY, fully_shard.__wrapped__), (REGISTRY_KEY, "fully_shard")):  # pyright: ignore[reportFunctionMemberAccess]
            del part.__dict__[key][name]
        del _composable_state._module_state_mapping[part]
        part.__class__ = type(part).__bases__[-1]


def replace_parameters(module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put `new[p]` in the place of every parameter p, wherever p is used."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = new[parameter]


def _hooks(part: Any) -> Iterator[Any]:
    state = state_of(part)
    yield from (getattr(state, name) for name in _HOOKS)
    # A module has no group where all its parameters belong to modules wrapped within it.
    if (group := state._fsdp_param_group) is not None:
        for name in _GROUP_HOOKS:
            yield from getattr(group, name).values()
        yield from (getattr(parameter, _PARAMETER_HOOK) for parameter in group.fsdp_params)


def _known(part: Any) -> bool:
    state = state_of(part)
    groups = [group] if (group := getattr(state, "_fsdp_param_group", None)) is not None else []
    return (
        hasattr(state, "_fsdp_param_group")
        and len(getattr(state, "_modules", ())) == 1
        and all(hasattr(state, name) for name in _HOOKS)
        and all(hasattr(group, name) for group in groups for name in _GROUP_HOOKS)
        and all(hasattr(p, _PARAMETER_HOOK) for group in groups for p in getattr(group, "fsdp_params", (None,)))
        and fully_shard.__wrapped__ in part.__dict__.get(STATE_KEY, {})  # pyright: ignore[reportFunctionMemberAccess]
        and "fully_shard" in part.__dict__.get(REGISTRY_KEY, {})
        and part in _composable_state._module_state_mapping
        and issubclass(type(part).__bases__[0], FSDPModule)
    )
