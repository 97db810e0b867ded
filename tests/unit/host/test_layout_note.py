"""The layout that is noted beside a checkpoint."""

import pytest

from verl_fuse.errors import FuseError

pytest.importorskip("ray")
worker = pytest.importorskip("verl_fuse.host.weights.layouts.worker")


def test_a_noted_layout_is_read_back_and_a_checkpoint_without_a_note_has_none(tmp_path):
    assert worker.noted(tmp_path) is None
    worker.note(tmp_path, 2)
    assert worker.noted(tmp_path) == 2


@pytest.mark.parametrize("content", [b"", b"2", b"{}", b'{"fsdp_size": true}', b'{"fsdp_size": "2"}', b"\xff"])
def test_a_damaged_note_is_named(tmp_path, content):
    (tmp_path / worker.LAYOUT_FILE).write_bytes(content)
    with pytest.raises(FuseError, match=r"verl_fuse_layout\.json: "):
        worker.noted(tmp_path)
