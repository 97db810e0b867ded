"""Extends verl's actor worker, which can train a mini-batch in several calls."""

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.metric import Metric
from verl.utils.tensordict_utils import assign_non_tensor, get_non_tensor_data
from verl.utils.tensordict_utils import get as get_value

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import Stopwatch
from verl_fuse_update.lean.options import LEAN, LeanOptions
from verl_fuse_update.lean.rows import old_log_probs_of
from verl_fuse_update.lean.worker import LeanTrainingWorker, lean_worker_class
from verl_fuse_update.stream.alone import alone, forget
from verl_fuse_update.stream.options import ORDER, StreamOrder
from verl_fuse_update.stream.part import StreamedRows
from verl_fuse_update.stream.totals import StreamTotals


class StreamTrainingWorker(LeanTrainingWorker):
    """verl's worker of one model on FSDP2.

    Gradients of `stream_rows` wait until `stream_finish` steps or `stream_drop` forgets them; between them an update of
    verl's is an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._totals: StreamTotals | None = None

    def train_mini_batch(self, data: Any) -> TensorDict:
        """Update on a batch as verl does."""
        if self._totals is not None:
            raise FuseError(f"an update begins while gradients of step {self._totals.step} wait for theirs")
        return super().train_mini_batch(data=data)

    def stream_rows(self, data: Any) -> TensorDict:
        """Add the gradients of these rows; a collective of the shard group, with `last` in its order of all ranks.

        Returns old log-probs and entropy of the rows, one value per response token; 0 for those that were not computed.
        """
        order: Any = get_non_tensor_data(data, ORDER, default=None)
        lean: Any = get_non_tensor_data(data, LEAN, default=LeanOptions())
        if self._totals is None:
            self._totals = StreamTotals(order.step)
        if self._totals.step != order.step:
            raise FuseError(f"rows of step {order.step} while gradients of step {self._totals.step} wait for theirs")
        self._complete(data)
        watch = Stopwatch()
        with self.engine.train_mode(zero_grad_on_exit=False), alone(self.engine, order.last):
            rows = StreamedRows(self.engine, data, lean, self.loss_fn, order, self._totals)
            rows.compute()
        self._totals.seconds += seconds_since(watch)
        if not order.counts:
            return TensorDict({}, batch_size=[])
        return old_log_probs_of(rows.outputs, rows.like, data["response_mask"])

    def stream_finish(self, order: StreamOrder) -> dict[str, Any]:
        """Make the one optimizer step after the last rows, a collective of all ranks. Return verl's metrics of the
        update, and `tokens` of the batch."""
        totals = self._totals
        engine: Any = self.engine
        if totals is None or totals.step != order.step:
            raise FuseError(f"step {order.step} ends without rows")
        watch = Stopwatch()
        whole = torch.tensor([totals.tokens, totals.weight], dtype=torch.float64, device=get_device_name())
        dist.all_reduce(whole, group=engine.get_data_parallel_group())
        tokens, weight = whole.tolist()
        scale = order.nominal / max(tokens, 1.0) if order.deferred else 1.0
        with engine.train_mode():
            _scale(engine.module, scale)
            norm = engine.optimizer_step()
        metrics = totals.scaled(scale, weight / dist.get_world_size()) | {"grad_norm": norm}
        metrics["lr"] = engine.lr_scheduler_step()
        totals.seconds += seconds_since(watch)
        self._totals = None
        return self._said(metrics, totals, scale) | {"tokens": tokens}

    def stream_drop(self) -> None:
        """Forget all gradients; every rank must do it."""
        forget(self.engine)
        self._totals = None

    def _complete(self, data: Any) -> None:
        """Add to a batch the fields that verl's `train_batch` adds."""
        settings = {
            "use_remove_padding": self.model_config.get("use_remove_padding", False),
            "use_dynamic_bsz": self.engine_config.use_dynamic_bsz,
            "max_token_len_per_gpu": self.engine_config.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": self.engine_config.micro_batch_size_per_gpu,
            "use_fused_kernels": self.engine_config.use_fused_kernels,
        }
        missing = {key: value for key, value in settings.items() if key not in data.keys()}  # noqa: SIM118
        assign_non_tensor(data, **missing)

    def _said(self, metrics: dict[str, Any], totals: StreamTotals, scale: float) -> dict[str, Any]:
        """Put the metrics together as verl's `train_mini_batch` does."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (totals.lengths, totals.seconds))
        output = self._postprocess_output(
            {"metrics": metrics, "loss": [totals.loss * scale], "model_output": {}},
            global_token_num=[length for of_rank, _ in found for length in of_rank],
            # The share of the time in which ranks computed.
            delta_time=sum(seconds for _, seconds in found) / len(found),
            forward_only=False,
            images_seqlens=None,
        )
        said = dict(get_value(output, "metrics"))
        for key, value in said.items():
            if isinstance(value, list):
                said[key] = (
                    Metric.aggregate_dp(value)
                    if isinstance(value[0], Metric)
                    else [one for of_rank in value for one in of_rank]
                )
        return said


def seconds_since(watch: Stopwatch) -> float:
    """Return the seconds since a stopwatch was started, after all that the device was given."""
    get_torch_device().synchronize()
    return watch.now - watch.start


def _scale(module: Any, scale: float) -> None:
    """Divide gradients by the loss's denominator; every parameter that is trained has one."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif scale != 1.0:
                parameter.grad._local_tensor.mul_(scale)


def stream_worker_class(base: type, options: LeanOptions) -> type:
    """Return a subclass of verl's actor worker `base` whose updates are lean, as `options` tell, and may be
    streamed."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def stream_rows(self: Any, data: Any) -> TensorDict:
        """Add the gradients of these rows, which are then in TransferQueue with their old log-probs."""
        return self.actor.stream_rows(data).cpu()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def stream_finish(self: Any, order: StreamOrder) -> dict[str, Any]:
        """Make the optimizer step."""
        return self.actor.stream_finish(order)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def stream_drop(self: Any) -> None:
        """Forget all gradients."""
        self.actor.stream_drop()

    members = {
        "__doc__": base.__doc__,
        "actor_worker_cls": StreamTrainingWorker,
        "stream_rows": stream_rows,
        "stream_finish": stream_finish,
        "stream_drop": stream_drop,
    }
    return type(f"Streamed{base.__name__}", (lean_worker_class(base, options),), members)
