"""Cuts a model's parameters into chunks of a few, so that a transfer needs room for one chunk only.

Invariants (tests/unit/reshard/test_loadable.py):
- the chunks hold all parameters, each once, in their order;
- a chunk of more than one parameter is at most `limit` elements long.
"""

import dataclasses
from collections.abc import Iterator

from verl_fuse.reshard.parameters import ModelParameters, Parameter


def chunks(weights: ModelParameters, limit: int) -> Iterator[ModelParameters]:
    """Cut the list of parameters; a longer parameter is a chunk of its own."""
    chosen: list[Parameter] = []
    elements = 0
    for parameter in weights.parameters:
        if chosen and elements + parameter.elements > limit:
            yield dataclasses.replace(weights, parameters=tuple(chosen))
            chosen, elements = [], 0
        chosen.append(parameter)
        elements += parameter.elements
    if chosen:
        yield dataclasses.replace(weights, parameters=tuple(chosen))
