"""A critic's checkpoint is loaded by another number of ranks than wrote it: everything is bitwise what was saved.

Real TrainingWorkers on FSDP2, gloo processes. Shows the invariants of plugins/verl_fuse_placement/resized.py.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from sharded_engines import same, went_on, write_models, wrote
from small_engines import Ranks, cpu_server

from verl_fuse.errors import FuseError

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

# Ranks that write, and the size of their shards.
WRITERS = ((4, -1), (4, 2), (1, -1))
READERS = (2, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The models' folder; meanwhile ranks have the cpu platform."""
    folder = tmp_path_factory.mktemp("models")
    with cpu_server():
        write_models(folder)
        yield folder


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, dict]:
    """What the first rank held of each checkpoint."""
    found = {}
    for size in {size for size, _ in WRITERS}:
        with Ranks(size, folder) as ranks:
            for shards in [shards for ranks_of, shards in WRITERS if ranks_of == size]:
                found[f"written by {size}x{shards}"] = ranks.call(wrote, folder, shards)[0]
    return found


@pytest.mark.parametrize("readers", READERS)
def test_everything_is_what_was_saved(folder: Path, written: dict[str, dict], readers: int):
    with Ranks(readers, folder) as ranks:
        found = {
            name: ranks.call(went_on, folder, name) for name in written if not name.startswith(f"written by {readers}x")
        }
    for name, ranks_found in found.items():
        saved = written[name]
        for rank in ranks_found:
            held = rank["held"]
            assert held.pop("rate") == saved["rate"], name
            assert same(held, {key: value for key, value in saved.items() if key != "rate"}), name
            assert rank["untouched"], name
    # And it learns the same from there on, as far as sums in another order are the same.
    whole, copies = (found[f"written by 4x{shards}"][0]["learned"] for shards in (-1, 2))
    for name in ("loss", "grad_norm"):
        assert copies[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-5)


def test_the_ranks_that_wrote_a_checkpoint_last_are_counted(tmp_path: Path, caplog):
    from verl_fuse_placement.resized import written_by

    assert written_by(tmp_path, 2) is None, "nothing to load: verl says so"
    for rank in range(4):
        (tmp_path / f"model_world_size_4_rank_{rank}.pt").touch()
    assert (written_by(tmp_path, 4), written_by(tmp_path, 2)) == (None, 4)
    # A run that chose another number went back to an earlier step, and saved this one again.
    for rank in range(4):
        os.utime(tmp_path / f"model_world_size_4_rank_{rank}.pt", (1, 1))
    for rank in range(2):
        (tmp_path / f"model_world_size_2_rank_{rank}.pt").touch()
    assert (written_by(tmp_path, 2), written_by(tmp_path, 1), written_by(tmp_path, 4)) == (None, 2, 2)
    assert "saved by [4, 2] ranks, in turn; the files of 2 are read" in caplog.text
    os.utime(tmp_path / "model_world_size_4_rank_3.pt", (2**32, 2**32))
    with pytest.raises(FuseError, match=r"a checkpoint of \[2, 4\] ranks; needs one set newer than the other"):
        written_by(tmp_path, 2)
    os.utime(tmp_path / "model_world_size_4_rank_3.pt", (1, 1))
    (tmp_path / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(FuseError, match="a save that broke off"):
        written_by(tmp_path, 4)


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_a_rank_whose_file_is_missing_is_named(tmp_path: Path, kind: str):
    import torch

    from verl_fuse_placement.resized import resize

    (tmp_path / f"{kind}_world_size_3_rank_0.pt").touch()
    (tmp_path / f"{kind}_world_size_3_rank_2.pt").touch()
    engine = SimpleNamespace(module=torch.nn.Linear(1, 1))
    with pytest.raises(FuseError, match=rf"{kind}_world_size_3_rank_1.pt missing; needs the files of all 3 ranks"):
        resize(tmp_path, 3, tmp_path, engine, 0, 2)
