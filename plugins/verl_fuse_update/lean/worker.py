"""Extends verl's actor worker, which leaves out of an update the parts that it does not need."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine_workers import TrainingWorker

from verl_fuse_update.lean.mini_batch import LeanMiniBatch
from verl_fuse_update.lean.model import check_model
from verl_fuse_update.lean.options import LEAN, ROW_FIELD, LeanOptions
from verl_fuse_update.lean.rows import Outputs, old_log_probs_of


class LeanTrainingWorker(TrainingWorker):
    """verl's worker of one model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mini_batch: LeanMiniBatch | None = None
        self._fresh = False
        # The outputs of the first mini-batch, where they are old log-probs, and an output of any row.
        self._first_outputs: Outputs = {}
        self._like_outputs: Mapping[str, torch.Tensor] = {}

    def train_mini_batch(self, data: Any) -> TensorDict:
        """Update on a batch as verl does."""
        data[ROW_FIELD] = torch.arange(len(data))
        self._fresh, self._first_outputs = True, {}
        return super().train_mini_batch(data=data)

    def train_batch(self, data: Any) -> TensorDict:
        """Update on one mini-batch."""
        stock: Any = self.loss_fn
        lean: Any = get_non_tensor_data(data, LEAN, default=LeanOptions())
        self._mini_batch = LeanMiniBatch(self.engine, data, lean, stock, self._fresh, self._first_outputs)
        self._fresh, self.loss_fn = False, self._mini_batch.loss
        try:
            with self._mini_batch.computing():
                output = super().train_batch(data)
            if self._mini_batch.own:
                self._first_outputs, self._like_outputs = self._mini_batch.outputs, self._mini_batch.like
            return output
        finally:
            self.loss_fn, self._mini_batch = stock, None

    def _postprocess_output(self, output: Any, *, global_token_num: Any, forward_only: bool, **more: Any) -> TensorDict:
        if not forward_only and self._mini_batch is not None:
            self._mini_batch.report(output)
            global_token_num = self._mini_batch.computed_tokens()
        return super()._postprocess_output(output, global_token_num=global_token_num, forward_only=forward_only, **more)

    def log_probs_of_update(self, data: Any) -> TensorDict | None:
        """Return log-probs and entropy that the first mini-batch of the last update computed for its rows, in their
        order; 0 where it computed none."""
        outputs, self._first_outputs = self._first_outputs, {}
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        return old_log_probs_of(outputs, self._like_outputs, data["response_mask"])


def lean_worker_class(base: type, options: LeanOptions) -> type:
    """Return a subclass of verl's actor worker `base` whose updates leave out the parts that their batch names,
    `options` at most."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))  # pyright: ignore[reportAttributeAccessIssue]
    def log_probs_of_update(self: Any, data: Any) -> TensorDict | None:
        """Return the old log-probs and the entropy of these rows, from their own update."""
        return self.actor.log_probs_of_update(data)

    build = base.init_model  # type: ignore[attr-defined]

    @functools.wraps(build)
    def init_model(self: Any) -> None:
        build(self)
        check_model(self.actor.engine, options)

    members = {
        "__doc__": base.__doc__,
        "actor_worker_cls": LeanTrainingWorker,
        "init_model": init_model,
        "log_probs_of_update": log_probs_of_update,
    }
    return type(f"Lean{base.__name__}", (base,), members)
