"""(c) Examines vLLM's rejection sampler: are its kernels the ones that were read, and do its samples follow the
distribution of the processed logits?

One request has many copies, with drafts that are right, wrong and half right, and temperatures below and above 1. The
counts of the first token, and of the second where the first draft was accepted, are compared with the softmax by
chi-square. A control with an expand kernel that loses the temperature must fail.
"""

import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ci.gpu.kernels import fingerprints_of, load, source, unread
from verl_fuse.errors import FuseError

WORDS, DRAFTS = 37, 3
SAMPLES = {"cuda": 200_000, "cpu": 2_000}
TEMPERATURES = (0.5, 1.0, 1.6)
# Chi-square, as a normal variable, is further off than so many standard deviations once in a million.
FURTHEST = 4.9


def run(device: torch.device, out: Path, *, tiny: bool) -> dict[str, Any]:
    text = source()
    found = fingerprints_of(text)
    sampler = load(text, device)
    samples = 150 if tiny else SAMPLES[device.type]
    temperatures = TEMPERATURES[:1] if tiny else TEMPERATURES
    tests = {f"temperature {value:g}": _deviations(sampler, device, samples, value) for value in temperatures}
    control = _deviations(sampler, device, samples, TEMPERATURES[0], lose_temperature=True)
    worst = max(abs(each) for test in tests.values() for each in test.values())
    changed = unread(found)
    faults = [f"{name} is not the text that was read" for name in changed]
    if worst > FURTHEST:
        faults.append(f"what is sampled is not distributed as the logits say: {worst:.1f} deviations")
    if max(control.values()) <= FURTHEST:
        faults.append("the control, temperatures lost, was not seen")
    interpreted = "Triton's interpreter" if device.type == "cpu" else "compiled by Triton"
    return {
        "kernels": found,
        "unread": changed,
        "run as": interpreted,
        "samples": samples,
        "deviations": tests,
        "control": control,
        "furthest": worst,
        "faults": faults,
    }


def _deviations(
    sampler: ModuleType, device: torch.device, samples: int, temperature: float, *, lose_temperature: bool = False
) -> dict[str, float]:
    """Return how far the counts of the first and second token are from the softmax, in standard deviations of
    chi-square."""
    torch.manual_seed(int(temperature * 100))
    logits = torch.randn(DRAFTS + 1, WORDS, device=device) * 1.5
    # The first draft is likely, the others are not.
    drafts = torch.tensor([int(logits[0].argmax()), 5, 7], dtype=torch.int32, device=device)
    ends = torch.arange(1, samples + 1, dtype=torch.int32, device=device) * DRAFTS
    asked = torch.full((samples,), temperature, device=device)
    spread = sampler.expand_batch_to_tokens(asked, ends, samples * DRAFTS, replace_from=0, replace_to=1)
    if not torch.equal(spread, asked.repeat_interleave(DRAFTS)):
        raise FuseError("expand_kernel does not repeat the temperature of a request for each of its drafts")
    if lose_temperature:
        spread = torch.ones_like(spread)
    target = logits[:DRAFTS].repeat(samples, 1) / spread[:, None]
    bonus = torch.multinomial((logits[DRAFTS] / temperature).softmax(0), samples, replacement=True)
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=asked, generators={})
    tokens = sampler.rejection_sample(
        drafts.repeat(samples), [DRAFTS] * samples, DRAFTS, ends, None, target, bonus[:, None].to(torch.int32), metadata
    ).cpu()
    wanted = (logits / temperature).softmax(-1).cpu()
    second = tokens[tokens[:, 0] == int(drafts[0])][:, 1]
    return {"first token": chi_square(tokens[:, 0], wanted[0]), "second token": chi_square(second, wanted[1])}


def chi_square(tokens: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return chi-square of the counts as a standard normal variable (Wilson and Hilferty); words expected less than
    five times count as one word."""
    counts = torch.bincount(tokens.long(), minlength=WORDS).double()
    expected = wanted.double() * len(tokens)
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = float(((counts - expected) ** 2 / expected.clamp(min=1e-12)).sum())
    freedom = len(counts) - 1
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
