"""Writes numbers with their units for readers."""

GIB = 2**30


def in_time(value: float, unit: str) -> str:
    """Return a time as text; `unit` is "s", or empty where a problem names no unit of costs."""
    return f"{value:g} {unit or 'units of time'}"


def in_memory(value: float, unit: str, unknown: str = " units of memory") -> str:
    """Return an amount of memory as text; `unit` is "B" (bytes, shown as GiB), or empty where a problem names no unit;
    then `unknown` stands for the unit."""
    return f"{value / GIB:.3g} GiB" if unit == "B" else f"{value:g}{unknown}"
