"""The files of a run."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from synthetic import synthetic_timeline

from verl_fuse.errors import FuseError
from verl_fuse.spec import files as text_files
from verl_fuse.timeline.files import page_of, prepare, read_step, record_step, recorded_steps
from verl_fuse.timeline.summary import summarize


def names(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


def summarized_steps(run_dir: Path) -> list[int]:
    return [item["step"] for item in json.loads((run_dir / "timeline/steps.json").read_text())]


def record(run_dir: Path, *steps: int, **options) -> None:
    for step in steps:
        record_step(run_dir, synthetic_timeline(step=step, requests=4), **options)


def test_a_step_leaves_these_files_and_can_be_read_back(tmp_path: Path):
    record(tmp_path, 3)
    assert names(tmp_path) == [
        "timeline.html",
        "timeline/step_000003.html",
        "timeline/step_000003.json",
        "timeline/step_000003.perfetto.json",
        "timeline/steps.json",
    ]
    assert read_step(tmp_path, 3) == synthetic_timeline(step=3, requests=4)
    assert page_of(tmp_path, 3) == tmp_path / "timeline/step_000003.html"


def test_only_what_is_asked_for_is_written(tmp_path: Path):
    record(tmp_path, 1, html=False, perfetto=False)
    assert names(tmp_path) == ["timeline/step_000001.json", "timeline/steps.json"]
    assert page_of(tmp_path, 1) is None


def test_old_steps_lose_their_files_and_keep_their_place_in_the_index(tmp_path: Path):
    record(tmp_path, 1, 2, 3, keep_steps=2)
    assert recorded_steps(tmp_path) == [2, 3]
    assert summarized_steps(tmp_path) == [1, 2, 3]
    index = (tmp_path / "timeline.html").read_text()
    assert "step_000002.html" in index
    assert "step_000001.html" not in index


def test_a_step_that_is_recorded_again_leaves_no_page_of_the_earlier_attempt(tmp_path: Path):
    record(tmp_path, 1, 2)
    record(tmp_path, 2, html=False, perfetto=False)
    assert [name for name in names(tmp_path) if "step_000002" in name] == ["timeline/step_000002.json"]


def test_a_resumed_run_replaces_what_the_earlier_attempt_did_after_its_checkpoint(tmp_path: Path):
    record(tmp_path, 1, 2, 3, 4)
    record(tmp_path, 2)
    assert recorded_steps(tmp_path) == [1, 2]
    assert summarized_steps(tmp_path) == [1, 2]


def test_files_of_others_are_left_alone(tmp_path: Path):
    folder = tmp_path / "timeline"
    folder.mkdir()
    (folder / "step_notes.html").write_text("mine")
    record(tmp_path, 1, 2, keep_steps=1)
    assert (folder / "step_notes.html").read_text() == "mine"


def test_prepare_keeps_the_index_of_a_run_that_resumes(tmp_path: Path):
    record(tmp_path, 1, 2)
    prepare(tmp_path)
    assert summarized_steps(tmp_path) == [1, 2]


SUMMARY = dataclasses.asdict(summarize(synthetic_timeline(step=1, requests=4)))


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"5",
        b"\xff",
        b"[" * 100_000,
        b"[1]",
        *(
            json.dumps([{**SUMMARY, **damage}]).encode()
            for damage in (
                {"step": "1"},
                {"step": True},
                {"requests": None},
                {"seconds": "long"},
                {"idle": [1]},
                {"idle": {"rank": None}},
                {"idle_overall": "none"},
            )
        ),
    ],
    ids=lambda content: repr(content[-60:]),
)
def test_a_damaged_index_is_moved_away_and_costs_no_run(tmp_path: Path, content: bytes):
    prepare(tmp_path)
    index = tmp_path / "timeline/steps.json"
    index.write_bytes(content)
    with pytest.warns(UserWarning, match=r"steps\.json: .*; it is steps\.json\.damaged now, and a new index begins"):
        prepare(tmp_path)
    assert index.with_name("steps.json.damaged").read_bytes() == content
    record(tmp_path, 1)
    assert summarized_steps(tmp_path) == [1]


def test_an_index_that_the_disk_does_not_give_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record(tmp_path, 1)

    def stale(path: Path, *_: object) -> str:
        raise FuseError(f"{path}: cannot be read") from OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(text_files, "read_text", stale)
        with pytest.raises(OSError, match="Stale file handle"):
            record(tmp_path, 2)
    assert summarized_steps(tmp_path) == [1]


def test_a_damaged_page_is_named_and_costs_no_other_step(tmp_path: Path):
    record(tmp_path, 1)
    (tmp_path / "timeline/step_000001.html").write_bytes(b"\xff\xfe")
    with pytest.warns(UserWarning, match=r"a page is left as it is: .*step_000001\.html: cannot be read: not UTF-8"):
        record(tmp_path, 2)
    assert summarized_steps(tmp_path) == [1, 2]


def test_a_missing_run_is_named(tmp_path: Path):
    with pytest.raises(FuseError, match=r"nowhere: no such directory; needs the directory of a run"):
        recorded_steps(tmp_path / "nowhere")


def test_an_empty_run_says_when_steps_appear(tmp_path: Path):
    with pytest.raises(FuseError, match=r"no recorded step under timeline/; .*fuse\.observe\.enabled=true"):
        recorded_steps(tmp_path)


def test_an_unknown_step_lists_what_there_is(tmp_path: Path):
    record(tmp_path, 1, 2)
    with pytest.raises(FuseError, match="step 5 is not recorded; recorded: 2 steps from 1 to 2"):
        read_step(tmp_path, 5)


def test_a_corrupt_step_is_named(tmp_path: Path):
    record(tmp_path, 1)
    (tmp_path / "timeline/step_000001.json").write_text('{"format": 1, "run"')
    with pytest.raises(FuseError, match=r"step_000001\.json: not a verl-fuse timeline"):
        read_step(tmp_path, 1)


def test_pages_link_the_steps_that_are_still_there(tmp_path: Path):
    record(tmp_path, 1, 2, 3, 4, keep_steps=3)
    links = {
        step: re.findall(r'rel="(\w+)" href="step_0*(\d+)\.html"', (page_of(tmp_path, step) or Path()).read_text())
        for step in (2, 3, 4)
    }
    assert links == {2: [("next", "3")], 3: [("prev", "2"), ("next", "4")], 4: [("prev", "3")]}
