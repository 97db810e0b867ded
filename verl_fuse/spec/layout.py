"""Spreads a model call over the devices of a mesh.

Invariants (tests/unit/spec/test_layout.py):
- `Layout.parse(str(layout)) == layout`;
- a degree is a whole number >= 1, and `ep * etp` divides `tp * dp * cp`, the ranks of a stage;
- `shards`, where there are any, divide `dp * cp`, without tensor, pipeline and expert parallelism;
- ranks count tensor, context, data, then pipeline parallelism from the inside out, Megatron's order.
"""

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import check_counts
from verl_fuse.spec.model import Model

_PART = re.compile(r"(tp|pp|dp|cp|ep|etp|fsdp)([1-9]\d*)")


@dataclass(frozen=True, order=True)
class Layout:
    """A layout has degrees of tensor, pipeline, data, context and expert parallelism. Experts are shared out within the
    ranks of a stage. `shards`: so many neighbours hold one model between them, and gather it block by block (FSDP); 0:
    each device holds the weights that its tensor and pipeline rank computes with (Megatron, rollout engines). `etp`: so
    many ranks cut one expert between them (Megatron's expert tensor parallelism, with which tensor ranks fold into
    expert ranks); 0: as many tensor ranks as the expert ranks leave within a stage."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    shards: int = 0
    etp: int = 0

    def __post_init__(self) -> None:
        check_counts("layout", self, ("tp", "pp", "dp", "cp", "ep"))
        stage = self.tp * self.dp * self.cp
        if stage % self.ep:
            raise FuseError(f"layout {self}: ep={self.ep}; needs a divisor of tp*dp*cp={stage}")
        if self.etp < 0 or (self.etp and (self.tp % self.etp or stage % (self.ep * self.etp))):
            raise FuseError(
                f"layout {self}: etp={self.etp}; needs a divisor of tp={self.tp}, and with ep one of tp*dp*cp={stage}"
            )
        if not self.shards:
            return
        if self.shards < 0 or self.dp * self.cp % self.shards:
            raise FuseError(f"layout {self}: fsdp={self.shards}; needs a divisor of dp*cp={self.dp * self.cp}")
        if (self.tp, self.pp, self.ep) != (1, 1, 1):
            raise FuseError(f"layout {self}: fsdp={self.shards}; needs tp=pp=ep=1")

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def holders(self) -> int:
        """Return the neighbours that hold a stage between them: tensor ranks, or shards."""
        return self.shards or self.tp

    @property
    def expert_tp(self) -> int:
        """Return the ranks that cut one expert between them."""
        return self.etp or math.gcd(self.tp, self.tp * self.dp * self.cp // self.ep)

    def check(self, model: Model) -> None:
        """Refuse, with a FuseError, a layout that cannot divide this model."""
        wrong = self.fault(model)
        if wrong:
            raise FuseError(f"layout {self} for {model.name}: {wrong}")

    def fault(self, model: Model) -> str | None:
        """Return the reason why this layout cannot divide the model; None if it can."""
        if model.heads % self.tp:
            return f"tp={self.tp}; needs a divisor of heads={model.heads}"
        if model.kv_heads % self.tp and self.tp % model.kv_heads:
            return f"tp={self.tp}; needs a divisor or a multiple of kv_heads={model.kv_heads}"
        if model.intermediate % self.tp:
            return f"tp={self.tp}; needs a divisor of intermediate={model.intermediate}"
        if self.pp > model.layers:
            return f"pp={self.pp}; needs at most layers={model.layers}"
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            return f"ep={self.ep}; needs a divisor of experts={model.experts}" if model.experts else "ep needs experts"
        return None

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse the text form, such as "tp2 pp4 dp8" or "dp16 fsdp8"; a degree left out is 1."""
        degrees: dict[str, int] = {}
        for part in text.split():
            match = _PART.fullmatch(part)
            name = "" if match is None else {"fsdp": "shards"}.get(match[1], match[1])
            if match is None or name in degrees or len(match[2]) > 9:
                raise FuseError(
                    f"layout {text!r}: {part!r}; needs degrees such as tp2 pp4 dp8 cp1 ep1 etp1 fsdp8, each once"
                )
            degrees[name] = int(match[2])
        return cls(**degrees)

    def __str__(self) -> str:
        parts = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp", "cp", "ep") if getattr(self, name) != 1]
        parts += [f"etp{self.etp}"] if self.etp else []
        parts += [f"fsdp{self.shards}"] if self.shards else []
        return " ".join(parts) or "dp1"


@functools.cache
def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Return the blocks per pipeline stage, as even as possible; the middle stages take the remainder, because the
    outer stages also hold embedding or head."""
    base, extra = divmod(layers, pp)
    first = (pp - extra) // 2
    return tuple(base + (first <= stage < first + extra) for stage in range(pp))


def copied_pipeline(devices: int, tensor: int, pipelines: Iterable[int]) -> int:
    """Return the stages of the copies that `devices` of a replica have of models with `tensor` tensor-parallel ranks
    and these numbers of stages: the largest number that divides the devices and each of them."""
    return math.gcd(devices // tensor, *pipelines)


def shard_sizes(ranks: int, per_node: int) -> tuple[int, ...]:
    """Return the sizes of a group of FSDP shards: all ranks, or whole nodes, 1, 2, 4, ... of them."""
    nodes = (per_node * 2**i for i in range(max(1, ranks // per_node).bit_length()))
    return (*(size for size in nodes if size < ranks and ranks % size == 0), ranks)
