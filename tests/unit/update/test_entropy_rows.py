"""Entropies that no update trains on are computed a few rows at a time; metrics of the computed samples are of these;
streamed seconds end with the device."""

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch
    from tensordict import TensorDict
    from verl.utils.metric import AggregationType, Metric
    from verl.utils.tensordict_utils import assign_non_tensor
    from verl.utils.torch_functional import entropy_from_logits

    from verl_fuse_update.lean import mini_batch
    from verl_fuse_update.lean.options import ROW_FIELD, LeanOptions
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


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", (3 * 2.0 + 5 * 4.0) / 8), ("seq-mean-token-sum", 13.0)])
def test_the_entropy_of_the_computed_samples_is_divided_by_these(alone, monkeypatch, mode: str, expected: float):
    """Three rows of 3, 5 and 4 tokens, the third left out; verl divides by all 12 tokens, or all 3 rows."""
    lengths, entropies = (3, 5, 4), (2.0, 4.0, 9.0)

    def rows(values) -> torch.Tensor:
        return torch.nested.as_nested_tensor(
            [torch.full((n,), v) for n, v in zip(lengths, values, strict=True)], layout=torch.jagged
        )

    data = TensorDict({"response_mask": rows((1.0, 1.0, 1.0)), ROW_FIELD: torch.arange(3)}, batch_size=[3])
    assign_non_tensor(data, batch_num_tokens=12, global_batch_size=3)

    def loss(model_output, data, dp_group):
        total = sum(float(row.sum()) for row in model_output["entropy"].unbind())
        divided = {"token-mean": data["batch_num_tokens"], "seq-mean-token-sum": data["global_batch_size"]}[mode]
        metrics = {"actor/entropy_loss": Metric(AggregationType.SUM, total / divided)}
        return torch.tensor(7.0), metrics | {"actor/pg_loss": Metric(AggregationType.SUM, 1.0 / divided)}

    monkeypatch.setattr(mini_batch, "get_device_name", lambda: "cpu")
    lean = object.__new__(mini_batch.LeanMiniBatch)
    lean._data, lean._kept, lean._group, lean._entropy, lean._loss = data, [0, 1], None, True, loss
    lean._options, lean.like = LeanOptions(skip_zero_gradient=True, metrics="computed"), {}
    lean.outputs = {n: {"entropy": torch.full((lengths[n],), entropies[n])} for n in (0, 1)}
    losses, metrics = lean._of_computed()
    entropy, policy = metrics["actor/entropy_loss"], metrics["actor/pg_loss"]
    assert losses == [7.0]
    assert entropy.aggregate() == pytest.approx(expected)
    # The terms of the samples that are left out are 0.
    assert policy.aggregate() == pytest.approx(1 / (12 if mode == "token-mean" else 3))
