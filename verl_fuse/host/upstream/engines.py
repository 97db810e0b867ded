"""Tells the kind of an engine of verl, and whose code its model is."""

from typing import Any


def is_megatron(engine: Any) -> bool:
    """Tell whether the engine is Megatron's, whose model is a list of the pipeline's parts on this rank."""
    return isinstance(engine.module, list)


def of_transformers(model: type) -> bool:
    """Tell whether the code of a model's class is of transformers itself; FSDP2 makes a class of its own above that."""
    from transformers import PreTrainedModel

    kinds = [kind for kind in model.__mro__ if issubclass(kind, PreTrainedModel)]
    return next(kind for kind in kinds if not kind.__module__.startswith("torch.")).__module__.startswith(
        "transformers.models."
    )
