"""Chooses one hue per pipeline; forwards are light, backwards dark. The hues are Okabe and Ito's, which colour-blind
readers can tell apart."""

_HUES = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (213, 94, 0))


def color(pipeline: int, kind: str) -> str:
    """Return the hex colour of an op."""
    red, green, blue = _rgb(pipeline, kind)
    return f"#{red:02x}{green:02x}{blue:02x}"


def ink(pipeline: int, kind: str) -> str:
    """Return black or white, whichever is easier to read on an op."""
    red, green, blue = ((c / 255) ** 2.2 for c in _rgb(pipeline, kind))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # The two contrasts, (luminance + 0.05) / 0.05 and 1.05 / (luminance + 0.05), are equal at 0.179.
    return "#000" if luminance > 0.179 else "#fff"


def _rgb(pipeline: int, kind: str) -> tuple[int, ...]:
    hue = _HUES[pipeline % len(_HUES)]
    return tuple(round(c + (255 - c) * 0.55) for c in hue) if kind == "F" else hue
