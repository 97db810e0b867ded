"""Entropies that no update trains on are computed a few rows at a time, and streamed seconds end with the device."""

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch
    from verl.utils.torch_functional import entropy_from_logits

    from verl_fuse_update.lean import mini_batch
    from verl_fuse_update.stream import worker


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
def test_entropies_in_parts_are_those_of_all_rows(monkeypatch, rows: int):
    monkeypatch.setattr(mini_batch, "ENTROPY_ROWS", 4)
    logits = torch.randn(rows, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    sizes = []

    def stock(part: torch.Tensor, **options: int) -> torch.Tensor:
        sizes.append(len(part))
        assert options == {"chunk_size": 3}
        return entropy_from_logits(part)

    found = mini_batch.without_gradient(stock, logits, chunk_size=3)
    assert torch.equal(found, entropy_from_logits(logits))
    assert not found.requires_grad
    assert sizes == [4] * (rows // 4) + [rows % 4] * bool(rows % 4)


def test_the_seconds_of_a_streamed_call_end_with_what_the_device_was_given(monkeypatch):
    watch = SimpleNamespace(start=10.0, now=11.0)
    device = SimpleNamespace(synchronize=lambda: setattr(watch, "now", 15.0))
    monkeypatch.setattr(worker, "get_torch_device", lambda: device)
    assert worker.seconds_since(watch) == 5.0
