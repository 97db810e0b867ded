"""Reads layouts from text, the inverse of their `str`.

Invariant (tests/unit/reshard/test_shardings.py): `sharding_from(str(sharding)) == sharding`.
"""

import re

from verl_fuse.errors import FuseError
from verl_fuse.reshard.fsdp import FsdpSharding
from verl_fuse.reshard.megatron import MegatronSharding
from verl_fuse.reshard.sharding import Sharding
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.spec.layout import Layout

FORMS = (
    "megatron tp2 pp2 dp2 [stages=3+5] [vocabulary=N] [local], fsdp SHARDS, fsdp REPLICASxSHARDS, replicated COPIES, "
    "vllm tp2 [dp2]"
)


def sharding_from(text: str) -> Sharding:
    """Return the layout that `text`, in one of `FORMS`, describes."""
    kind, *parts = text.split()
    try:
        if kind == "megatron":
            return _megatron(parts)
        if kind == "vllm":
            layout = Layout.parse(" ".join(parts))
            if layout == Layout(tp=layout.tp, dp=layout.dp):
                return VllmSharding(layout.tp, layout.dp)
        elif kind in ("fsdp", "replicated") and len(parts) == 1 and re.fullmatch(r"(\d+x)?\d+", parts[0]):
            *replicas, last = map(int, parts[0].split("x"))
            if kind == "fsdp":
                return FsdpSharding(last, *replicas)
            if not replicas:
                return FsdpSharding(1, last)
    except FuseError as error:
        raise FuseError(f"layout {text!r}: {error}") from error
    raise FuseError(f"layout {text!r}; needs one of: {FORMS}")


def _megatron(parts: list[str]) -> MegatronSharding:
    degrees = [part for part in parts if "=" not in part and part != "local"]
    options = dict(part.split("=", 1) for part in parts if "=" in part)
    stages, vocabulary = options.pop("stages", ""), options.pop("vocabulary", "0")
    if options or not re.fullmatch(r"(\d+(\+\d+)*)?", stages) or not vocabulary.isdigit():
        raise FuseError(f"needs one of: {FORMS}")
    return MegatronSharding(
        Layout.parse(" ".join(degrees)),
        tuple(map(int, stages.split("+"))) if stages else (),
        int(vocabulary),
        "local" not in parts,
    )
