"""Measuring with torch on the CPU: every part and pass gets a time, and the modules compute
what they are measured for."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from verl_fuse.cost.table import PARTS  # noqa: E402
from verl_fuse.errors import FuseError  # noqa: E402
from verl_fuse.runtime.profile import BenchSettings, measure_device, measure_model  # noqa: E402
from verl_fuse.runtime.transformer import Block, Head  # noqa: E402
from verl_fuse.spec.model import Model  # noqa: E402
from verl_fuse.spec.model_names import model_named  # noqa: E402

TINY = Model("tiny", 2, 32, 4, 2, 8, 48, 50)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that spin for each other take minutes where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench() -> BenchSettings:
    return BenchSettings(torch.device("cpu"), torch.float32, repeats=1, seconds=0.0)


@pytest.mark.parametrize("model", [TINY, TINY.as_value_model()], ids=["policy", "value"])
def test_every_part_and_pass_is_measured(bench: BenchSettings, model: Model):
    measured = measure_model(bench, model, 1, (1, 3), (4, 16))
    assert [(m.part, m.direction) for m in measured.measurements] == list(PARTS)
    assert (measured.model, measured.tp) == (model, 1)


def test_a_tensor_rank_holds_its_share():
    whole, half = Block(TINY, 1), Block(TINY, 2)
    sizes = [sum(p.numel() for p in block.parameters()) for block in (whole, half)]
    assert sizes[0] == TINY.block_parameters
    assert sizes[1] == (TINY.block_parameters - 2 * TINY.hidden) / 2 + 2 * TINY.hidden


def test_attention_is_causal():
    block, x = Block(TINY, 1), torch.randn(1, 6, TINY.hidden)
    changed = x.clone()
    changed[:, -1] += 1.0
    torch.testing.assert_close(block(x)[:, :-1], block(changed)[:, :-1])
    assert not torch.allclose(block(x)[:, -1], block(changed)[:, -1])


def test_a_cached_context_is_attended_to():
    block, x = Block(TINY, 1), torch.randn(2, 1, TINY.hidden)
    caches = [torch.randn(2, 2, TINY.kv_heads, 5, TINY.head_dim) for _ in range(2)]
    first, second = (block(x, cache) for cache in caches)
    assert first.shape == x.shape
    assert not torch.allclose(first, second)


def test_heads_give_log_probs_or_values():
    x, tokens = torch.randn(2, 3, TINY.hidden), torch.zeros(2, 3, dtype=torch.long)
    log_probs = Head(TINY, 1)(x, tokens)
    assert log_probs.shape == (2, 3)
    assert (log_probs < 0).all()
    assert Head(TINY.as_value_model(), 1)(x, tokens).shape == (2, 3)
    assert Head(TINY, 1).draw(x[:, :1]).shape == (2, 1)


def test_the_device_is_measured(bench: BenchSettings):
    device = measure_device(bench)
    assert device.name == "CPU"
    assert min(device.memory, device.flops, device.bandwidth) > 1e8


def test_what_cannot_be_measured_is_refused(bench: BenchSettings):
    with pytest.raises(FuseError, match="blocks with experts cannot be profiled"):
        Block(model_named("qwen3-30b-a3b"), 1)
    with pytest.raises(FuseError, match="tp=3; needs a divisor of heads=4"):
        Block(TINY, 3)
    with pytest.raises(FuseError, match="device 'cuda:99'"):
        BenchSettings.on("cuda:99", "float32")
    with pytest.raises(FuseError, match="precision 'int4'; allowed: float32"):
        BenchSettings.on("cpu", "int4")


@pytest.mark.gpu
def test_an_accelerator_is_measured():
    if not torch.cuda.is_available():
        pytest.skip("no accelerator here")
    bench = BenchSettings.on("cuda", "bfloat16")
    device = measure_device(bench)
    assert device.name != "CPU"
    assert device.flops > 1e13
    measured = measure_model(bench, model_named("qwen2.5-0.5b"), 1, (1, 8), (128, 1024))
    forward = next(m for m in measured.measurements if (m.part, m.direction) == ("block", "forward"))
    assert forward.seconds[1][1] > forward.seconds[0][0]
    with pytest.raises(FuseError, match="4096 sequences of 65536 tokens do not fit cuda"):
        measure_model(bench, model_named("qwen2.5-0.5b"), 1, (4096,), (65536,))
