"""How a model call is spread over the devices of a mesh.

Invariants (tests/unit/spec/test_layout.py):
- `Layout.parse(str(layout)) == layout`;
- a degree is a whole number >= 1, and `ep` divides `dp * cp`;
- ranks count tensor, context, data, then pipeline parallelism from the inside out, Megatron's order.
"""

import functools
import re
from dataclasses import dataclass

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import check_counts
from verl_fuse.spec.model import Model

_PART = re.compile(r"(tp|pp|dp|cp|ep)(\d+)")


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of tensor, pipeline, data, context and expert parallelism. Experts are shared out within the data-
    and context-parallel ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        check_counts("layout", self, ("tp", "pp", "dp", "cp", "ep"))
        if self.dp * self.cp % self.ep:
            raise FuseError(f"layout {self}: ep={self.ep}; needs a divisor of dp*cp={self.dp * self.cp}")

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def check(self, model: Model) -> None:
        """Refuse, with a FuseError, a layout that cannot divide this model."""
        wrong = self.fault(model)
        if wrong:
            raise FuseError(f"layout {self} for {model.name}: {wrong}")

    def fault(self, model: Model) -> str | None:
        """Why this layout cannot divide the model; None if it can."""
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
        """From the text form, such as "tp2 pp4 dp8"; a degree left out is 1."""
        degrees: dict[str, int] = {}
        for part in text.split():
            match = _PART.fullmatch(part)
            if match is None or match[1] in degrees or len(match[2]) > 9:
                raise FuseError(
                    f"layout {text!r}: {part!r}; needs degrees such as tp2 pp4 dp8 cp1 ep1, each at most once"
                )
            degrees[match[1]] = int(match[2])
        return cls(**degrees)

    def __str__(self) -> str:
        parts = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp", "cp", "ep") if getattr(self, name) != 1]
        return " ".join(parts) or "dp1"


@functools.cache
def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Blocks per pipeline stage, as even as can be; the middle stages take the remainder, because the outer ones
    also hold embedding or head."""
    base, extra = divmod(layers, pp)
    first = (pp - extra) // 2
    return tuple(base + (first <= stage < first + extra) for stage in range(pp))
