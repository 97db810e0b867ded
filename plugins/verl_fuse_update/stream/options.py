"""Defines the options that driver and workers of a streamed update share."""

from dataclasses import dataclass

# In a batch's extra_info: the order that its rows are part of.
ORDER = "verl_fuse_stream"
# What a call reads of its rows, beside what a forward pass does.
STREAM_FIELDS = ("advantages",)


@dataclass(frozen=True)
class StreamOrder:
    """The order for the update of one step: the loss is divided by `nominal` tokens until their number is known, where
    that is `deferred`.

    `counts`: rows are of the batch; without it they only carry the collectives of a rank that has none. `last`: the
    call of all ranks that ends the gradient, after which the optimizer steps.
    """

    step: int
    nominal: float
    deferred: bool
    counts: bool = True
    last: bool = False
