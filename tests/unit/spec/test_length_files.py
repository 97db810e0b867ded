"""Lengths from files and from recorded timelines."""

import re
from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.length_files import lengths_from, read_lengths, requests_of
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.timeline import Span, Timeline


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace.csv", "id,n\na,3\nb,5\nc,3\n"),
        ("trace.jsonl", '{"n": 3}\n{"n": 5}\n{"n": 3}\n'),
        ("tokens.jsonl", '{"n": [1, 2, 3]}\n{"n": [1, 2, 3, 4, 5]}\n{"n": [7, 7, 7]}\n'),
    ],
)
def test_a_column_is_read(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    assert read_lengths(tmp_path / name, "n") == lengths_from(f"{name}#n", tmp_path) == LengthDistribution.of([3, 5, 3])


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"n": [3, 5, 3], "ids": [[1], [1, 2], [3]]}), tmp_path / "trace.parquet")
    assert read_lengths(tmp_path / "trace.parquet", "n") == LengthDistribution.of([3, 5, 3])
    assert read_lengths(tmp_path / "trace.parquet", "ids") == LengthDistribution.of([1, 2, 1])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.csv", "a,b\n1,2\n", "no column 'n'; there is 'a', 'b'"),
        ("trace.csv", "n\n1\nx\n", "row 2: 'x'; needs a whole number"),
        ("trace.csv", "n\n1.5\n", "row 1: '1.5'; needs a whole number"),
        ("trace.csv", "n\n0\n", "lengths: value 0; needs 1 to"),
        ("trace.csv", "n\n", "lengths: no values"),
        ("trace.jsonl", "{\n", "line 1: not JSON"),
        ("trace.jsonl", "[1]\n", "no column 'n'; there is none"),
        ("trace.txt", "n\n", r"needs a file ending in \.csv"),
        ("trace.csv", "n\nnan\n", "row 1: 'nan'; needs a whole number"),
        ("trace.csv", "n\n1\ninf\n", "row 2: 'inf'; needs a whole number"),
        ("trace.csv", "n\n1e30\n", "lengths: value 1000000000000000019884624838656; needs 1 to"),
        ("trace.csv", "n\n" + 131073 * "1" + "\n", "cannot be read: field larger than field limit"),
        ("trace.jsonl", '{"n": NaN}\n', "row 1: nan; needs a whole number"),
        ("trace.jsonl", '{"n": -Infinity}\n', "row 1: -inf; needs a whole number"),
        ("trace.jsonl", '{"n": 1e30}\n', "lengths: value 1000000000000000019884624838656; needs 1 to"),
        ("trace.jsonl", f'{{"n": 1{400 * "0"}}}\n', "row 1: 10.*; needs a whole number"),
        ("trace.jsonl", f'{{"n": 1{5000 * "0"}}}\n', "line 1: not JSON"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(FuseError, match=f"{re.escape(name)}: {message}"):
        read_lengths(tmp_path / name, "n")


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_a_parquet_file_that_is_not_whole_is_named(tmp_path: Path, kept: float):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "trace.parquet"
    parquet.write_table(arrow.table({"n": [3, 5, 3]}), path)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(FuseError, match=r"trace\.parquet: not a whole Parquet file"):
        read_lengths(path, "n")


def recorded(run_dir: Path, *responses: int) -> None:
    (run_dir / "timeline").mkdir(parents=True)
    for step, tokens in enumerate(responses, start=1):
        spans = (Span("request", "replica 0", "generate", 0, 1, {"prompt_tokens": 9, "response_tokens": tokens}),)
        text = Timeline("run", step, 0, 1, spans).to_json()
        (run_dir / f"timeline/step_{step:06d}.json").write_text(text)
        (run_dir / f"timeline/step_{step:06d}.perfetto.json").write_text("{}")


def test_lengths_of_a_recorded_run(tmp_path: Path):
    recorded(tmp_path / "run", 4, 6)
    assert lengths_from("run#response", tmp_path) == LengthDistribution.of([4, 6])
    assert lengths_from("run#prompt", tmp_path) == LengthDistribution.of([9, 9])


def test_a_run_that_says_nothing_is_named(tmp_path: Path):
    (tmp_path / "run").mkdir()
    with pytest.raises(FuseError, match="run: no recorded step under timeline/"):
        lengths_from("run#response", tmp_path)
    with pytest.raises(FuseError, match="run: 'reward' of a recorded run; needs prompt or response"):
        lengths_from("run#reward", tmp_path)
    recorded(tmp_path / "broken", 4)
    (tmp_path / "broken/timeline/step_000001.json").write_text("{")
    with pytest.raises(FuseError, match=r"step_000001\.json: not a verl-fuse timeline"):
        lengths_from("broken#response", tmp_path)


def test_requests_of_recorded_timelines():
    spans = (
        Span("request", "replica 0", "generate", 0, 1, {"prompt_tokens": 9, "response_tokens": 4}),
        Span("request", "replica 1", "generate", 0, 2, {"prompt_tokens": 8, "response_tokens": 6}),
        Span("request", "replica 1", "generate", 0, 2, {"prompt_tokens": 8, "error": "TimeoutError"}),
        Span("request", "replica 1", "generate", 0, 2, {"response_tokens": 8}),
        Span("ref", "rank 0", "inference", 2, 3),
    )
    prompts, responses = requests_of([Timeline("run", 1, 0, 3, spans)])
    assert (prompts, responses) == (LengthDistribution.of([9, 8]), LengthDistribution.of([4, 6]))
    with pytest.raises(FuseError, match="no finished request"):
        requests_of([Timeline("run", 1, 0, 3, spans[2:])])
