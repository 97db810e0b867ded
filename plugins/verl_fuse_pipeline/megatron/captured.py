"""Captures calls of `forward_backward_func` where verl's engines make them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import verl.workers.engine.megatron.transformer_impl as transformer_impl
from verl.utils.tensordict_utils import get_non_tensor_data

from verl_fuse.errors import FuseError
from verl_fuse.runtime.stage import TensorSpec
from verl_fuse_pipeline.joint import JointCalls
from verl_fuse_pipeline.megatron.messages import Padding
from verl_fuse_pipeline.megatron.placement import replaced
from verl_fuse_pipeline.megatron.stage import ForwardBackwardCall


@contextmanager
def capturing(calls: JointCalls) -> Iterator[None]:
    """Make Megatron's schedule, as verl's engine sees it, a joint call within the block."""
    joint = lambda *args, **kwargs: lambda **request: calls.call(request)  # noqa: E731
    with replaced(transformer_impl, "get_forward_backward_func", joint):
        yield


class CapturedCall:
    """One call of `forward_backward_func`."""

    def __init__(self, request: Mapping[str, Any], padding: Padding) -> None:
        if request["forward_only"]:
            raise FuseError("forward_only=True: inference does not run within a fused update")
        (data,) = request["data_iterator"] if isinstance(request["data_iterator"], list) else [request["data_iterator"]]
        count = request["num_microbatches"]
        batches = [next(data) for _ in range(count)]
        self.specs: list[TensorSpec] = [_message(batch, padding) for batch in batches]
        self.call = ForwardBackwardCall(request["forward_step_func"], iter(batches), request["model"], count)
        self.results: list[Any] = []


def _message(batch: Any, padding: Padding) -> TensorSpec:
    lengths: Sequence[int] = batch["input_ids"].offsets().diff().tolist()
    longest: Any = get_non_tensor_data(batch, key="forced_max_seqlen", default=None)
    return padding.message(lengths, longest)
