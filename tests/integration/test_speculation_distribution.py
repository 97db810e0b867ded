"""Tokens sampled with drafts are distributed like tokens without: a trained model, thousands of samples, and faults
that the same tests must find."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl_runs import SUPPORT, make_task

pytest.importorskip("verl")
torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes ten minutes: VERL_FUSE_LONG=1"),
]

PROMPTS, SAMPLES, ROUNDS = 16, 32, 14
SETTINGS = ((1.0, 1.0), (0.7, 0.9))
# What all tests of one setting together may be wrong in.
LEVEL = 0.01


def uniformity(values: np.ndarray) -> float:
    """p of Kolmogorov and Smirnov's test that these are uniform on (0, 1)."""
    n, ordered = len(values), np.sort(values)
    if n == 0:
        return 1.0
    above, below = np.arange(1, n + 1) / n - ordered, ordered - np.arange(n) / n
    distance = max(above.max(), below.max())
    t = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * t * t) for k in range(1, 101)))


def likeness(one: np.ndarray, other: np.ndarray) -> float:
    """p of the chi-square test that two samples of whole numbers have one distribution; values met less
    than ten times count as one."""
    values, counts = np.unique(np.concatenate([one, other]), return_counts=True)
    common = values[counts >= 10]
    table = np.array(
        [[*((found == value).sum() for value in common), (~np.isin(found, common)).sum()] for found in (one, other)]
    )
    table = table[:, table.sum(axis=0) > 0]
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    statistic, freedom = ((table - expected) ** 2 / expected).sum(), table.shape[1] - 1
    return (
        1.0 if freedom == 0 else float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))
    )


def two_sided(deviations: float) -> float:
    return math.erfc(abs(deviations) / math.sqrt(2))


def verdicts(drafted: Any, plain: Any) -> dict[str, float]:
    """p of every test."""
    found = {"lengths": likeness(drafted["lengths"], plain["lengths"]), "accepted": two_sided(float(drafted["excess"]))}
    for position in range(drafted["first"].shape[1]):
        found[f"tokens at {position}"] = likeness(drafted["first"][:, position], plain["first"][:, position])
    return found | {name: uniformity(drafted[name]) for name in ("tried", "recovered", "bonus", "plain", "token")}


@pytest.fixture(scope="module")
def sampled(verl_home, tmp_path_factory):
    """Samples of one kind, generated once."""
    make_task(verl_home, "ppo-cpu")
    folder, done = tmp_path_factory.mktemp("distribution"), {}

    def sample(temperature: float, top_p: float, drafts: bool = True, fault: str | None = None) -> Any:
        name = f"{temperature}-{top_p}-{drafts}-{fault}"
        if name not in done:
            done[name] = _generate(verl_home / "tasks/euclid", folder / name, temperature, top_p, drafts, fault)
        return done[name]

    return sample


def _generate(task: Path, folder: Path, temperature: float, top_p: float, drafts: bool, fault: str | None) -> Any:
    asked = {
        "model": str(task / "model"),
        "data": str(task / "train.parquet"),
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "rounds": ROUNDS,
        "temperature": temperature,
        "top_p": top_p,
        "fault": fault,
    }
    if drafts:
        asked["speculation"] = {"tokens": 8, "history_bytes": 1 << 24, "epochs": 2, "folder": str(folder)}
    out = folder.with_name(f"{folder.name}.npz")
    command = [sys.executable, str(SUPPORT / "verified_tokens.py"), json.dumps(asked), str(out)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert found.returncode == 0, found.stderr[-4000:]
    with np.load(out) as whole:
        return dict(whole)


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_what_is_sampled_with_drafts_is_distributed_as_without(sampled, temperature, top_p):
    drafted, plain = sampled(temperature, top_p), sampled(temperature, top_p, drafts=False)
    found = verdicts(drafted, plain)
    sizes = {name: len(drafted[name]) for name in ("lengths", "tried", "recovered", "bonus", "plain")}
    print(f"temperature {temperature}, top-p {top_p}: {sizes}", json.dumps(found), f"excess {drafted['excess']:.2f}")
    assert len(drafted["lengths"]) == len(plain["lengths"]) == PROMPTS * SAMPLES * ROUNDS >= 7000
    assert min(sizes.values()) > 1000
    # Log-probs of vLLM and transformers differ in the last digits; a token at the edge of top-p may be on either side.
    assert drafted["impossible"] < 1e-3
    assert min(found.values()) > LEVEL / len(found), found


@pytest.mark.parametrize("fault", ["unpatched", "lenient", "untested"])
def test_a_fault_is_found(sampled, fault):
    drafted, plain = sampled(1.0, 1.0, fault=fault), sampled(1.0, 1.0, drafts=False)
    found = verdicts(drafted, plain)
    print(fault, json.dumps(found), f"excess {drafted['excess']:.2f}")
    assert min(found.values()) < LEVEL / len(found)
