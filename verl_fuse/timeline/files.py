"""Writes and reads the files of a run: RUN_DIR/timeline.html, the index of steps, and per step
RUN_DIR/timeline/step_000001.{json,perfetto.json,html}.

Invariants (tests/unit/timeline/test_files.py):
- a reader never sees half a file: each is written beside its place and renamed;
- the index tells one history: recording step N removes the files that an earlier attempt left of the steps after N;
- with `keep_steps`, files of older steps go, their summaries in the index stay;
- the page of a step links the pages of the steps before and after it, where they exist;
- a step that cannot be read does not keep other steps from being read, and a damaged page keeps its links.
"""

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import load, read_text, write_atomically
from verl_fuse.spec.timeline import Timeline
from verl_fuse.timeline.index_page import index_page
from verl_fuse.timeline.perfetto import to_perfetto
from verl_fuse.timeline.step_page import linked, step_page
from verl_fuse.timeline.summary import StepSummary, summarize

TIMELINE_FOLDER = "timeline"
INDEX_PAGE = "timeline.html"
_SUMMARIES = "steps.json"
_STEP_FILE = re.compile(r"step_(\d{6,})\.(json|perfetto\.json|html)")


def prepare(run_dir: Path) -> None:
    """Make sure that steps can be recorded in the folder: create the folder and try a file. Raises OSError."""
    folder = run_dir / TIMELINE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _SUMMARIES, _dump_summaries(_read_summaries(folder)))


def record_step(
    run_dir: Path, timeline: Timeline, *, html: bool = True, perfetto: bool = True, keep_steps: int | None = None
) -> StepSummary:
    """Write the files of one step and bring the index up to date. Raises OSError where the disk refuses."""
    summary = summarize(timeline)
    folder = run_dir / TIMELINE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _remove_steps(folder, lambda step: step >= timeline.step)
    write_atomically(_step_path(run_dir, timeline.step, "json"), timeline.to_json())
    if perfetto:
        write_atomically(_step_path(run_dir, timeline.step, "perfetto.json"), to_perfetto(timeline))
    if html:
        write_atomically(_step_path(run_dir, timeline.step, "html"), step_page(timeline, summary, str(run_dir)))
    if keep_steps is not None:
        _remove_steps(folder, lambda step: step <= timeline.step - keep_steps)
    _link_neighbours(folder)
    summaries = [*(old for old in _read_summaries(folder) if old.step < timeline.step), summary]
    write_atomically(folder / _SUMMARIES, _dump_summaries(summaries))
    if html:
        links = {
            path.name: f"{TIMELINE_FOLDER}/{path.name}" for path in folder.iterdir() if _STEP_FILE.fullmatch(path.name)
        }
        write_atomically(run_dir / INDEX_PAGE, index_page(timeline.run, summaries, links))
    return summary


def located(path: Path) -> tuple[Path, int | None]:
    """Return (run directory, step) of a run directory, of its folder of timelines, or of a page in it; the step is None
    where no single step is meant."""
    if path.is_dir():
        inside = path.name == TIMELINE_FOLDER and not (path / TIMELINE_FOLDER).is_dir()
        return (path.absolute().parent if inside else path), None
    match = _STEP_FILE.fullmatch(path.name)
    if match and path.absolute().parent.name == TIMELINE_FOLDER:
        return path.absolute().parent.parent, int(match[1])
    if path.name == INDEX_PAGE:
        return path.parent, None
    if path.exists():
        raise FuseError(f"{path}: needs the directory of a run (fuse.run_dir), its {INDEX_PAGE}, or the page of a step")
    return path, None


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the steps of this run whose timeline can be read, ascending; a FuseError if there is no such step."""
    if not run_dir.is_dir():
        raise FuseError(f"{run_dir}: no such directory; needs the directory of a run (fuse.run_dir)")
    found = (_STEP_FILE.fullmatch(path.name) for path in (run_dir / TIMELINE_FOLDER).glob("step_*.json"))
    steps = sorted(int(match[1]) for match in found if match and match[2] == "json")
    if not steps:
        raise FuseError(
            f"{run_dir}: no recorded step under {TIMELINE_FOLDER}/; steps are recorded with "
            "trainer.v1.trainer_mode=fuse and "
            "fuse.observe.enabled=true, once the first one has ended"
        )
    return steps


def read_step(run_dir: Path, step: int) -> Timeline:
    """Read the timeline of one step; a FuseError lists the existing steps."""
    steps = recorded_steps(run_dir)
    if step not in steps:
        kept = str(steps[0]) if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        raise FuseError(f"{run_dir}: step {step} is not recorded; recorded: {kept}")
    return load(_step_path(run_dir, step, "json"), Timeline.from_json)


def readable_steps(run_dir: Path, steps: Iterable[int]) -> Iterator[Timeline]:
    """Yield the timelines of these steps that can be read, with a warning for each other step; raise the first step's
    FuseError if no step can be read."""
    damaged: list[FuseError] = []
    found = False
    for step in steps:
        try:
            timeline = read_step(run_dir, step)
        except FuseError as error:
            damaged.append(error)
            continue
        _warn(damaged)
        damaged, found = [], True
        yield timeline
    if damaged and not found:
        raise damaged[0]
    _warn(damaged)


def _warn(damaged: Iterable[FuseError]) -> None:
    for error in damaged:
        warnings.warn(f"a recorded step is skipped: {error}", stacklevel=3)


def page_of(run_dir: Path, step: int) -> Path | None:
    """Return the HTML page of a step, or None if there is no page."""
    path = _step_path(run_dir, step, "html")
    return path if path.is_file() else None


def _step_path(run_dir: Path, step: int, suffix: str) -> Path:
    return run_dir / TIMELINE_FOLDER / f"step_{step:06d}.{suffix}"


def _remove_steps(folder: Path, outdated: Callable[[int], bool]) -> None:
    for path in list(folder.iterdir()):
        match = _STEP_FILE.fullmatch(path.name)
        if match and outdated(int(match[1])):
            path.unlink(missing_ok=True)


def _link_neighbours(folder: Path) -> None:
    """Link the neighbours in the pages of the first step and of the last two; the pages between have their links
    already."""
    pages = sorted(path for path in folder.glob("step_*.html") if _STEP_FILE.fullmatch(path.name))
    for index in sorted({0, len(pages) - 2, len(pages) - 1} & set(range(len(pages)))):
        before = pages[index - 1].name if index else None
        after = pages[index + 1].name if index + 1 < len(pages) else None
        try:
            page = read_text(pages[index])
        except FuseError as error:
            warnings.warn(f"a page is left as it is: {error}", stacklevel=2)
            continue
        if page != (changed := linked(page, before, after)):
            write_atomically(pages[index], changed)


def _dump_summaries(summaries: list[StepSummary]) -> str:
    return json.dumps([dataclasses.asdict(summary) for summary in summaries])


def _read_summaries(folder: Path) -> list[StepSummary]:
    path = folder / _SUMMARIES
    if not path.exists():
        return []
    try:
        return load(path, _parse_summaries)
    except FuseError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        # What a crash left, for example. No run ends for the sake of its index.
        damaged = path.replace(path.with_name(f"{path.name}.damaged"))
        warnings.warn(f"{error}; it is {damaged.name} now, and a new index begins", stacklevel=3)
        return []


def _parse_summaries(text: str) -> list[StepSummary]:
    found = json.loads(text)
    if not isinstance(found, list):
        raise FuseError(f"{found!r:.200}; needs a list of step summaries")
    return [StepSummary.from_dict(item) for item in found]
