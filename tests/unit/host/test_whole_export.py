"""Whole parameters for standalone replicas, left by all training ranks in turns. No Ray, no engine."""

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch

    from verl_fuse.host.weights import buckets, exports
    from verl_fuse_elastic.standalone.sync import exported_whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_bucket_is_left_by_one_rank_and_loaded_in_the_models_order(monkeypatch, ranks):
    monkeypatch.setattr(buckets, "OBJECT_BYTES", 80)
    monkeypatch.setattr(exports.ray, "put", lambda bucket: bucket)
    gathered = []

    def parameters(rank):
        for number in range(11):
            gathered.append((rank, number))
            yield f"p{number}", torch.full((10,), float(number))

    def left(rank):
        engine = SimpleNamespace(get_per_tensor_param=lambda: (parameters(rank), None), is_param_offload_enabled=False)
        return exports.export_whole(engine, rank, ranks)

    by_rank = [left(rank) for rank in range(ranks)]
    assert len(gathered) == 11 * ranks, "a collective: every rank walks through all of them"
    sizes = [len(found) for found in by_rank]
    assert (max(sizes) - min(sizes), sum(sizes)) == (int(6 % ranks > 0), 6)
    found = exported_whole(SimpleNamespace(export_whole=lambda: by_rank))
    assert [shard.name for bucket in found for shard in bucket] == [f"p{number}" for number in range(11)]
    assert all(shard.data[0] == int(shard.name[1:]) for bucket in found for shard in bucket)
    assert {shard.data.dtype for bucket in found for shard in bucket} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_types_are_those_that_verl_hands_on(monkeypatch, dtype):
    """An engine keeps some parameters in float32, whatever the rollout's dtype."""
    monkeypatch.setattr(exports.ray, "put", lambda bucket: bucket)
    data = torch.tensor([1, 2, 3], dtype=dtype) / 3 if dtype.is_floating_point else torch.ones(3, dtype=dtype)
    engine = SimpleNamespace(get_per_tensor_param=lambda: ([("p", data)], None), is_param_offload_enabled=False)
    ((shard,),) = exports.export_whole(engine, 0, 1)
    assert shard.data.dtype == dtype
    assert torch.equal(shard.data, data)
