"""Numbers with their units, as people read them."""

GIB = 2**30


def in_time(value: float, unit: str) -> str:
    """`unit` is "s", or empty where a problem does not say what its costs are in."""
    return f"{value:g} {unit or 'units of time'}"


def in_memory(value: float, unit: str, unknown: str = " units of memory") -> str:
    """`unit` is "B" (bytes, shown as GiB), or empty where a problem does not say; then `unknown` stands for it."""
    return f"{value / GIB:.3g} GiB" if unit == "B" else f"{value:g}{unknown}"
