"""Tells the kind of an engine of verl."""

from typing import Any


def is_megatron(engine: Any) -> bool:
    """Tell whether the engine is Megatron's, whose model is a list of the pipeline's parts on this rank."""
    return isinstance(engine.module, list)
