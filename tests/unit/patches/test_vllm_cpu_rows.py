"""The rows that vLLM multiplies on a CPU: few different numbers, and the same results."""

from types import ModuleType, SimpleNamespace

import pytest

from verl_fuse_patches.vllm_cpu_rows import apply, rounded

torch = pytest.importorskip("torch")


def test_few_numbers_of_rows_are_left_and_few_rows_are_added():
    numbers = {0: 0, 1: 1, 2: 4, 5: 8, 17: 20, 33: 36, 65: 72, 130: 144, 257: 288, 512: 512}
    assert {rows: rounded(rows) for rows in numbers} == numbers
    for rows in range(1, 5000):
        assert rows <= rounded(rows) <= max(rows + rows / 8, rows + 3)
        assert rounded(rounded(rows)) == rounded(rows)
    for power in range(2, 12):
        assert len({rounded(rows) for rows in range(2**power + 1, 2 ** (power + 1) + 1)}) <= 8


@pytest.mark.parametrize("shape", [(1, 3), (7, 3), (64, 3), (2, 35, 3)])
def test_the_added_rows_are_dropped(shape):
    weight, bias, multiplied = torch.randn(3, 5), torch.randn(5), []
    module = ModuleType("ops")

    def multiply(handler, x, bias):
        multiplied.append(x.reshape(-1, handler.k).shape[0])
        return x @ weight + bias

    module.onednn_mm = multiply  # type: ignore[attr-defined]
    apply(module)
    x = torch.randn(shape)
    found = module.onednn_mm(SimpleNamespace(k=3, n=5), x, bias)
    assert torch.allclose(found, x @ weight + bias, atol=1e-6)
    assert found.shape == (*shape[:-1], 5)
    assert multiplied == [rounded(x.numel() // 3)]


def test_a_graph_that_is_compiled_is_of_any_number_of_rows():
    weight = torch.randn(3, 5)
    module = ModuleType("ops")
    module.onednn_mm = lambda handler, x, bias: x @ weight  # type: ignore[attr-defined]
    apply(module)
    handler = SimpleNamespace(k=3, n=5)
    compiled = torch.compile(lambda x: module.onednn_mm(handler, x, None), fullgraph=True, backend="eager")
    for rows in (7, 9):
        x = torch.randn(rows, 3)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), x @ weight)
