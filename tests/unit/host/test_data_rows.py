"""Training data that does not fill a batch, counted from the footers of Parquet files."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.data_rows import row_refusals, rows_at_most
from verl_fuse.host.start.settings import load_settings
from verl_fuse.spec.composed import getter

pyarrow = pytest.importorskip("pyarrow")
BATCH, MOST = "data.train_batch_size", "data.train_max_samples"


@pytest.fixture
def files(tmp_path):
    """Parquet files of 5 and of 3 rows, the same 3 rows as JSON lines, and a damaged file."""
    import pyarrow.parquet

    for name, rows in (("five", 5), ("three", 3)):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": list(range(rows))}), tmp_path / f"{name}.parquet")
    (tmp_path / "three.jsonl").write_text('{"prompt": 1}\n' * 3)
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and nothing else")
    return {path.name: str(path) for path in tmp_path.iterdir()}


def configuration(train_files, batch=8, most=-1, **more):
    data = {
        "train_files": train_files,
        "train_batch_size": batch,
        "train_max_samples": most,
        "custom_cls": {"path": None},
    }
    return OmegaConf.merge({"data": data, "trainer": {"use_v1": True, "val_only": False}}, more)


def refused(*arguments, **more) -> list[str]:
    return list(map(str, row_refusals(configuration(*arguments, **more))))


def test_data_of_as_many_rows_as_a_batch_is_enough(files):
    both = [files["five.parquet"], files["three.parquet"]]
    assert refused(both, 8) == []
    assert refused(files["five.parquet"], 5) == []
    assert refused(both, 9) == [
        f"{BATCH}=9: data.train_files has 8 prompts, and verl drops a batch that is not full: needs at most 8, or more "
        "prompts"
    ]
    assert [text.partition(":")[0] for text in refused(files["five.parquet"], 6)] == [f"{BATCH}=6"]


def test_a_limit_of_samples_counts(files):
    assert refused(files["five.parquet"], 4, 4) == []
    said = f"{MOST}=3: a batch has {BATCH}=4 prompts: needs as many or more, or -1 for all"
    assert refused(files["five.parquet"], 4, 3) == [said]
    assert refused("hdfs://far/away.parquet", 4, 3) == [said]
    assert refused(files["five.parquet"], 4, 100) == []
    assert [text.partition(":")[0] for text in refused(files["five.parquet"], 6, 100)] == [f"{BATCH}=6"]


@pytest.mark.parametrize("other", ["three.jsonl", "damaged.parquet", "missing.parquet", None, "hdfs://far/a.parquet"])
def test_what_cannot_be_counted_is_left_to_verl(files, other):
    unknown = files.get(other, other)
    assert refused([files["five.parquet"], unknown], 1000) == []


@pytest.mark.parametrize(
    "more",
    [
        {"data": {"custom_cls": {"path": "mine.py"}}},
        {"trainer": {"val_only": True}},
        {"trainer": {"use_v1": False}},
        {"data": {"train_batch_size": None}},
    ],
)
def test_what_verl_does_not_train_in_batches_of_these_rows_is_left_to_verl(files, more):
    assert refused(files["five.parquet"], 1000, **more) == []


def test_rows_are_an_upper_bound(files):
    assert rows_at_most(getter(configuration([files["five.parquet"]] * 2))) == 10
    assert rows_at_most(getter(configuration(files["five.parquet"], most=2))) == 2
    assert rows_at_most(getter(configuration(files["three.jsonl"]))) is None


def test_files_are_looked_at_only_where_a_run_is_to_start(files):
    config = configuration(files["five.parquet"], 6)
    load_settings(config)
    with pytest.raises(FuseError, match=r"^data\.train_batch_size=6: data\.train_files has 5 prompts"):
        load_settings(config, starting=True)
