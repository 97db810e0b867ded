"""Follows every element of a program, starting from the layouts' tensors of each rank; does not know how programs are
made.

The check needs a byte per element and rank, so it is for small models: a layout treats a model with fewer
and narrower blocks alike.
"""

import numpy as np
from numpy.typing import NDArray

from verl_fuse.errors import FuseError
from verl_fuse.reshard.program import Message, StreamRange, TransferProgram
from verl_fuse.reshard.rectangles import rectangles
from verl_fuse.reshard.sharding import PlacedSharding

# The elements that a rank has of each parameter, by name.
Masks = dict[str, NDArray[np.bool_]]


def check(program: TransferProgram) -> None:
    """Raise a FuseError naming the first message, rank and parameter at which an element is lost, sent without being
    there, or sent twice."""
    ranks = range(len(program.nodes))
    held = _masks(program, program.source)
    wanted = _masks(program, program.target)
    has: dict[int, Masks] = {rank: {name: np.zeros_like(mask) for name, mask in wanted[rank].items()} for rank in ranks}
    messages = [message for rank in ranks for message in program.receives(rank)]
    sent = [message for rank in ranks for message in program.sends(rank)]
    if sorted(sent, key=_key) != sorted(messages, key=_key):
        raise FuseError("transfer program: what is sent is not what is received")
    for rank in ranks:
        for span in program.kept(rank):
            _take(program, span, f"rank {rank} keeps", held[rank], wanted[rank], has[rank], {})
    for message in sorted(messages, key=_key):
        if message.elements > program.message_elements:
            raise FuseError(f"transfer program: {message} is longer than {program.message_elements} elements")
        sender = has[message.sender] if message.relayed else held[message.sender]
        receiver = message.receiver
        for span in message.spans:
            text = f"round {message.round}, rank {message.sender} to rank {receiver}"
            _take(program, span, text, sender, wanted[receiver], has[receiver], held[receiver])
    _busy(messages)
    for rank in ranks:
        for name, mask in wanted[rank].items():
            missing = mask & ~has[rank][name]
            missing[program.weights.parameters[program.weights.index[name]].rows :] = False
            if missing.any():
                raise FuseError(f"transfer program: rank {rank} never gets {missing.sum()} elements of {name!r}")


def _key(message: Message) -> tuple[int, int, int]:
    return message.round, message.sender, message.receiver


def _masks(program: TransferProgram, placed: PlacedSharding) -> dict[int, Masks]:
    """Return masks of the elements of each parameter that lie in each rank's tensors, padding of the vocabulary
    included."""
    weights, sides = program.weights, (program.source.sharding, program.target.sharding)
    shapes = {p.name: (max(side.cells(weights, p).rows[-1] for side in sides), p.columns) for p in weights.parameters}
    found: dict[int, Masks] = {rank: {} for rank in range(len(program.nodes))}
    for rank in placed.ranks:
        for piece in (piece for tensor in placed.tensors(weights, rank) for piece in tensor.pieces):
            mask = found[rank].setdefault(piece.parameter, np.zeros(shapes[piece.parameter], np.bool_))
            mask[piece.row : piece.row + piece.rows, piece.column : piece.column + piece.columns] = True
    return found


def _take(
    program: TransferProgram, span: StreamRange, text: str, sender: Masks, wanted: Masks, has: Masks, held: Masks
) -> None:
    for part in rectangles(program.streams, span):
        name = program.weights.parameters[part.parameter].name
        at = np.s_[part.row : part.row + part.rows, part.column : part.column + part.columns]
        where = (
            f"transfer program: {text}: {name!r}, rows {part.row} to {part.row + part.rows}, columns {part.column} "
            f"to {part.column + part.columns}"
        )
        if name not in sender or not sender[name][at].all():
            raise FuseError(f"{where}: the sender does not have them")
        if name not in wanted or not wanted[name][at].all():
            raise FuseError(f"{where}: the receiver does not want them")
        if has[name][at].any() or (name in held and held[name][at].any()):
            raise FuseError(f"{where}: the receiver has them already")
        has[name][at] = True


def _busy(messages: list[Message]) -> None:
    for side in ("sender", "receiver"):
        seen: set[tuple[int, int]] = set()
        for message in messages:
            key = message.round, getattr(message, side)
            if key in seen:
                raise FuseError(f"transfer program: rank {key[1]} is {side} of two messages in round {key[0]}")
            seen.add(key)
