"""Defines how a rank exchanges messages with others: over one process group, without waiting."""

from typing import Protocol

import torch


class Handle(Protocol):
    """A message on its way."""

    def done(self) -> bool:
        """Tell whether the message is through; LostPeer if it never will be."""
        ...


class Port(Protocol):
    """Sends and receives tensors by `backend`. `in_order`: all ranks must post in the same order; `most`: as many
    messages may be on their way to a peer at a time, and from one."""

    backend: str
    in_order: bool
    most: float

    def send(self, message: torch.Tensor, peer: int) -> Handle:
        """Begin to send a tensor that nobody changes until it is through."""
        ...

    def receive(self, message: torch.Tensor, peer: int) -> Handle:
        """Begin to receive into a tensor that nobody reads until it is through."""
        ...

    def pause(self, seconds: float) -> None:
        """Return when a message may have got through, after `seconds` at the latest; the caller asks again."""
        ...

    def close(self) -> None:
        """End the port and its group, once no message is on its way; after a fault the call does not wait: a message on
        its way is aborted, or its thread left behind."""
        ...
