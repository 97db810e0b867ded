"""One hue per pipeline; forwards light, backwards dark. The hues are Okabe and Ito's, which
colour-blind readers can tell apart."""

_HUES = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0))


def color(pipeline: int, kind: str) -> str:
    """Hex colour of an op."""
    red, green, blue = _HUES[pipeline % len(_HUES)]
    if kind == "F":
        red, green, blue = (round(c + (255 - c) * 0.55) for c in (red, green, blue))
    return f"#{red:02x}{green:02x}{blue:02x}"
