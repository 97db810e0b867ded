"""Chooses the picture's form by the file's suffix."""

from collections.abc import Callable, Mapping
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.schedule.render.page import html_page
from verl_fuse.schedule.render.plot import save_plot
from verl_fuse.schedule.render.text import text_page
from verl_fuse.spec.files import save
from verl_fuse.spec.schedule import Schedule

WRITERS: Mapping[str, Callable[[Schedule, Path], None]] = {
    ".html": lambda schedule, path: save(path, html_page(schedule)),
    ".png": save_plot,
    ".svg": save_plot,
    ".txt": lambda schedule, path: save(path, text_page(schedule)),
}


def write_picture(schedule: Schedule, path: Path) -> None:
    """Write the schedule as .html or .txt, or (with matplotlib) as .svg or .png."""
    if path.suffix not in WRITERS:
        raise FuseError(f"{path}: suffix {path.suffix!r}; allowed: {', '.join(WRITERS)}")
    WRITERS[path.suffix](schedule, path)
