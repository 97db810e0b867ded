"""Holds the state of an FSDP2 engine that follows its layout: parameters, and the optimizer's state of each.

Invariants (tests/integration/test_changed_layouts.py):
- all state that the optimizer keeps of a parameter is kept: state sharded like the parameter is moved, numbers stay;
any other state is a FuseError;
- a tensor that has been sent and taken is released, so that both layouts together need little more memory than the
larger one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl_fuse.errors import FuseError
from verl_fuse.host.weights.layouts.unwrap import replace_parameters
from verl_fuse.host.weights.sync.trained import layout_of
from verl_fuse.reshard.local import shape_of
from verl_fuse.reshard.parameters import ModelParameters, Parameter
from verl_fuse.reshard.sharding import PlacedSharding
from verl_fuse.runtime.reshard.stream import ParameterStream
from verl_fuse.spec.model import Model


class Held:
    """All state under names: a parameter's own name, and the same name followed by the key of the optimizer's state."""

    def __init__(self, engine: Any) -> None:
        self._module, self._optimizer = engine.module, engine.optimizer
        self._tensors: dict[str, Any] = dict(engine.module.named_parameters())
        names = {id(parameter): name for name, parameter in self._tensors.items()}
        self._groups = [[names[id(p)] for p in group["params"]] for group in self._optimizer.param_groups]
        self._states = {names[id(p)]: dict(state) for p, state in self._optimizer.state.items()}
        for name, state in self._states.items():
            moved = {key: value for key, value in state.items() if _follows(name, key, value, self._tensors[name])}
            self._tensors |= {_key(name, key): value for key, value in moved.items()}
            state.update(dict.fromkeys(moved))
        self._kinds = {name: (tensor.device, tensor.dtype) for name, tensor in self._tensors.items()}
        layouts = {layout_of(name, tensor) for name, tensor in self._tensors.items()}
        if len(layouts) != 1:
            raise FuseError(f"layout change: parameters are sharded in {len(layouts)} ways; needs one for all of them")
        self.placed = PlacedSharding(*layouts.pop())
        config = engine.model_config.hf_config
        self._model = Model.from_hf(config.to_dict(), config.model_type)

    def weights(self) -> list[ModelParameters]:
        """Return the tensors to be moved, by type of element: a transfer has one type on the way."""
        kinds: dict[torch.dtype, list[Parameter]] = {}
        for name, tensor in self._tensors.items():
            rows = tensor.shape[0]
            kinds.setdefault(tensor.dtype, []).append(Parameter(name, rows, tensor.numel() // rows, "whole"))
        return [ModelParameters(self._model, tuple(parameters)) for parameters in kinds.values()]

    def dtype(self, weights: ModelParameters) -> torch.dtype:
        """Return the type of one of `weights()`."""
        return self._kinds[weights.parameters[0].name][1]

    def take(self) -> None:
        """Take all state from the optimizer."""
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            group["params"] = []

    def through(
        self, stream: ParameterStream, weights: ModelParameters, version: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Send one of `weights()`; yield this rank's part in the new layout, where it has a part."""
        own = {parameter.name: _local(self._tensors.pop(parameter.name), parameter) for parameter in weights.parameters}
        for name, tensor in stream.run(own, version):
            yield name, tensor.to(self._kinds[name][0])
            del own[name]

    def put(self, arrived: dict[str, torch.Tensor]) -> None:
        """Fill the module, whose parameters are empty and in the new layout, and its optimizer."""
        like: dict[str, Any] = dict(self._module.named_parameters())

        def filled(name: str, key: str) -> DTensor:
            mould, (device, dtype) = like[name], self._kinds[key]
            shape = mould.to_local().shape
            # A rank beyond the last row has no element.
            local = arrived.pop(key).view(shape) if key in arrived else torch.empty(shape, dtype=dtype, device=device)
            return DTensor.from_local(
                local, mould.device_mesh, mould.placements, run_check=False, shape=mould.shape, stride=mould.stride()
            )

        new = {name: nn.Parameter(filled(name, name), mould.requires_grad) for name, mould in like.items()}
        replace_parameters(self._module, {like[name]: parameter for name, parameter in new.items()})
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = [new[name] for name in names]
        for name, state in self._states.items():
            self._optimizer.state[new[name]] = {
                key: filled(name, _key(name, key)) if _key(name, key) in self._kinds else value
                for key, value in state.items()
            }


def _key(name: str, key: str) -> str:
    return f"{name} {key}"


def _follows(name: str, key: str, value: Any, parameter: Any) -> bool:
    """Tell whether a state of the optimizer is sharded like its parameter; a number is not."""
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and not isinstance(value, DTensor)):
        return False
    if isinstance(value, DTensor) and (value.shape, value.placements) == (parameter.shape, parameter.placements):
        return True
    raise FuseError(
        f"layout change: the optimizer's {key!r} of {name!r} is a {type(value).__name__} of shape "
        f"{tuple(value.shape)}; needs a number, or what is sharded as its parameter, of shape {tuple(parameter.shape)}"
    )


def _local(tensor: DTensor, parameter: Parameter) -> torch.Tensor:
    local = tensor.to_local().detach()
    return local.view(shape_of(parameter, local.shape[0], parameter.columns))
