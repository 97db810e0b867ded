"""Extends verl's critic worker: the first mini-batch of an update computes the values that its returns are made of, for
later epochs, too.

Invariants (tests/integration/test_own_values.py):
- with micro-batches like those of verl's pass for values, values are bitwise that pass's, and the update is verl's up
  to the rounding of returns;
- a batch that does not ask for values of its own is updated by verl's code alone.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.utils.padding import response_from_nested, response_to_nested

from verl_fuse_update.critic.returns import Rewards, returns_of
from verl_fuse_update.lean.mini_batch import Loss
from verl_fuse_update.lean.model import check_passes
from verl_fuse_update.lean.options import ROW_FIELD
from verl_fuse_update.lean.rows import nested

# A batch's extra_info has the rewards (Rewards) of an update with values of its own under this key.
OWN_VALUES = "verl_fuse_own_values"


class OwnValues:
    """The values of one mini-batch with `loss`, verl's loss function; `known` are those of the update's first
    mini-batch, by a row's place in the batch of its rank, None in that mini-batch."""

    def __init__(self, loss: Loss, rewards: Rewards, known: Mapping[int, torch.Tensor] | None) -> None:
        self._loss, self._rewards, self._known = loss, rewards, known
        self.values: dict[int, torch.Tensor] = {}

    def loss(self, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
        """Return verl's loss of a micro-batch, whose values are compared with those of before the update."""
        mask = data["response_mask"]
        values = response_from_nested(model_output["values"].detach(), mask)
        if self._known is None:
            self.values |= dict(zip(data[ROW_FIELD].tolist(), values.unbind(), strict=True))
        else:
            # One mini-batch: there was no pass.
            passed: Any = data.get("values", values)
            rows = zip(data[ROW_FIELD].tolist(), passed.unbind(), strict=True)
            values = nested([self._known.get(row, other).to(passed.dtype) for row, other in rows])
        data["values"], data["returns"] = values, response_to_nested(returns_of(data, values, self._rewards), mask)
        return self._loss(model_output=model_output, data=data, dp_group=dp_group)


def own_values_worker_class(base: type) -> type:
    """Return a subclass of verl's critic worker `base` whose update computes its own values for a batch that asks for
    them."""
    stock: Any = base

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def train_mini_batch(self: Any, data: TensorDict) -> TensorDict | None:
        """Update on a batch."""
        data[ROW_FIELD], self.own_values = torch.arange(len(data)), None
        return stock.train_mini_batch(self, data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def train_batch(self: Any, data: TensorDict) -> TensorDict | None:
        """Update on one mini-batch."""
        rewards: Any = get_non_tensor_data(data, OWN_VALUES, default=None)
        if rewards is None:
            return stock.train_batch(self, data)
        loss = self.loss_fn
        own = OwnValues(loss, rewards, self.own_values)
        self.loss_fn = own.loss
        try:
            output = stock.train_batch(self, data)
        finally:
            self.loss_fn = loss
        if self.own_values is None:
            self.own_values = own.values
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))  # pyright: ignore[reportAttributeAccessIssue]
    def values_of_update(self: Any, data: TensorDict) -> TensorDict | None:
        """Return the values of the first mini-batch's rows from their own update, one for each response token."""
        found, self.own_values = self.own_values, None
        assert found is not None, "values of an update before any"
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        rows = [found[row].cpu() for row in range(len(data))]
        return TensorDict({"values": nested(rows)}, batch_size=[len(rows)])

    @functools.wraps(stock.reset)
    def reset(self: Any) -> None:
        stock.reset(self)
        check_passes(self.engine, "fuse.update.skip_values")

    members = {
        "__doc__": base.__doc__,
        "own_values": None,
        "train_mini_batch": train_mini_batch,
        "train_batch": train_batch,
        "values_of_update": values_of_update,
        "reset": reset,
    }
    return type(f"OwnValues{base.__name__}", (base,), members)
