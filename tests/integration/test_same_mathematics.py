"""Given the same rollouts, stock verl and verl-fuse compute the same numbers: observing is bitwise equal, streaming equal to rounding.

Rollouts are recorded once by stock verl and replayed by verl's own `skip.rollout_tq`. Streaming splits batches differently, so padding
inside micro-batches, and with it the order of float32 sums, differs; nothing else may.
"""

from pathlib import Path

import pytest
from verl_runs import SMALL, SMALL_CRITIC, Finished, run

torch = pytest.importorskip("torch")
pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

STEPS = 2
# Streaming against one batch: the largest absolute difference allowed, in float32, after the given step.
INFERENCE_TOLERANCE = 1e-5
PARAMETER_TOLERANCE = 1e-4


def overrides(home: Path) -> tuple[str, ...]:
    return (
        *SMALL,
        *SMALL_CRITIC,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "skip.rollout_tq.enable=true",
        "skip.rollout_tq.steps=[1,2]",
        f"skip.rollout_tq.dump_dir={home}/rollouts",
    )


def recorded(home: Path, name: str, *extra: str, baseline: bool = False, fault: str = "") -> Finished:
    # verl files recorded rollouts by experiment name: one name for all runs, a directory for each.
    return run(
        home,
        "ppo-cpu",
        *overrides(home),
        *extra,
        name=name,
        experiment="mathematics",
        baseline=baseline,
        record=home / f"{name}.numbers",
        fault=fault,
    )


STREAMING = "fuse.interstage.enabled=true"


@pytest.fixture(scope="module")
def stock(verl_home) -> Finished:
    """Stock verl on recorded rollouts; the recording run comes first, with the same command."""
    first = recorded(verl_home, "recording", baseline=True)
    assert first.code == 0, first.output[-4000:]
    done = recorded(verl_home, "stock", baseline=True)
    assert done.code == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def observed(verl_home, stock) -> Finished:
    done = recorded(verl_home, "observed")
    assert done.code == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def streamed(verl_home, stock) -> Finished:
    done = recorded(verl_home, "streamed", STREAMING)
    assert done.code == 0, done.output[-4000:]
    return done


def batches(finished: Finished, step: int) -> dict:
    return torch.load(finished.folder.with_name(f"{finished.folder.name}.numbers") / f"batch_{step}.pt")


def parameters(finished: Finished, step: int) -> dict:
    folder = finished.folder.with_name(f"{finished.folder.name}.numbers")
    files = sorted(folder.glob(f"*_{step}_rank*.pt"))
    assert [file.name for file in files] == [
        f"{role}_{step}_rank{rank}.pt" for role in ("actor", "critic") for rank in (0, 1)
    ]
    return {f"{file.stem}:{name}": tensor for file in files for name, tensor in torch.load(file).items()}


def largest_difference(left, right) -> float:
    assert left.shape == right.shape
    return float((left.double() - right.double()).abs().max()) if left.numel() else 0.0


COMPUTED = ["old_log_probs", "ref_log_prob", "values", "advantages", "returns"]
# verl's own metrics of what was computed and learned; times and memory differ from run to run.
LEARNED = [
    "actor/entropy",
    "actor/pg_loss",
    "actor/reward_kl_penalty",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/score/mean",
    "critic/advantages/mean",
    "training/rollout_probs_diff_max",
]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_the_comparison_is_about_the_same_rollouts_and_has_padding(stock, observed, streamed, step):
    reference = batches(stock, step)
    assert sum(reference["padding"]) == 8, "6 prompts x 4 samples, padded to mini-batches of 16"
    for other in (observed, streamed):
        numbers = batches(other, step)
        assert numbers["padding"] == reference["padding"]
        for field in ("responses", "rm_scores", "response_mask"):
            pairs = zip(numbers["rows"][field], reference["rows"][field], strict=True)
            assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_observing_is_bitwise_equal_to_stock(stock, observed, step):
    reference, numbers = batches(stock, step)["rows"], batches(observed, step)["rows"]
    for field in COMPUTED:
        assert all(torch.equal(left, right) for left, right in zip(numbers[field], reference[field], strict=True)), (
            field
        )
    reference, numbers = parameters(stock, step), parameters(observed, step)
    assert len(reference) > 40
    assert [name for name in reference if not torch.equal(reference[name], numbers[name])] == []
    for name in LEARNED:
        assert observed.metrics[step][name] == stock.metrics[step][name], name


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_streaming_computes_the_same_numbers(stock, streamed, step):
    assert streamed.metrics[step]["fuse/streamed_samples"] == 16
    reference, numbers = batches(stock, step)["rows"], batches(streamed, step)["rows"]
    tolerance = INFERENCE_TOLERANCE if step == 1 else PARAMETER_TOLERANCE
    for field in COMPUTED:
        worst = max(largest_difference(*pair) for pair in zip(numbers[field], reference[field], strict=True))
        assert worst <= tolerance, field
    reference, numbers = parameters(stock, step), parameters(streamed, step)
    worst = max(largest_difference(numbers[name], reference[name]) for name in reference)
    assert worst <= PARAMETER_TOLERANCE
    for name in LEARNED:
        assert streamed.metrics[step][name] == pytest.approx(stock.metrics[step][name], rel=1e-3, abs=1e-4), name


def test_a_dropped_micro_group_ends_the_run(verl_home, stock):
    broken = recorded(verl_home, "dropped", STREAMING, fault="drop_micro_group")
    assert broken.code != 0
    assert "is missing from at least one of 32 rows" in broken.output
    assert not list((verl_home / "dropped.numbers").glob("actor_*")), "nothing was trained on the incomplete batch"


def test_a_wrong_row_shows_in_the_comparison(verl_home, stock):
    broken = recorded(verl_home, "wrong_row", STREAMING, fault="wrong_row")
    assert broken.code == 0
    reference, numbers = batches(stock, 1)["rows"]["values"], batches(broken, 1)["rows"]["values"]
    worst = max(largest_difference(*pair) for pair in zip(numbers, reference, strict=True))
    assert worst > 10 * INFERENCE_TOLERANCE
