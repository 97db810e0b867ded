"""The measured cost of a drafter on an accelerator."""

import re
from pathlib import Path

import numpy as np
import pytest

from verl_fuse.cost.drafter import ACCEPTED, FIGURES, PASSES, pass_factor


def test_the_factors_are_the_measured_ones():
    assert pass_factor(np.array([1.0, 8.0, 64.0, 256.0])) == pytest.approx(
        [4.96 / 3.04, 5.04 / 2.89, 6.44 / 3.11, 10.7 / 5.71]
    )


def test_between_them_the_logarithm_of_the_requests_counts_and_beyond_them_nothing_changes():
    low, middle, high = pass_factor(np.array([8.0, np.sqrt(8.0 * 64.0), 64.0]))
    assert middle == pytest.approx((low + high) / 2)
    assert pass_factor(np.array([0.25, 1024.0])) == pytest.approx([4.96 / 3.04, 10.7 / 5.71])


def test_the_figures_in_words():
    assert FIGURES == (
        "on an accelerator a pass with the drafter on took 1.6 to 2.1 times as long before anything was drafted (1 to "
        "256 requests; one H100, vLLM 0.24, 1.5 billion parameters); tokens whose drafts were all accepted came 3.4 "
        "times as fast with 8 requests and 0.9 times as fast with 64 requests"
    )


def test_the_plugin_s_readme_has_the_same_figures(repo: Path):
    text = (repo / "plugins/verl_fuse_speculation/README.md").read_text()
    table = text[text.index("## On accelerators") :].split("\n\n")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {int(row[0]): (float(row[1]), float(row[3])) for row in rows} == PASSES
    accepted = {int(row[0]): (float(row[6]), float(row[7])) for row in rows if re.fullmatch(r"[0-9.]+", row[6])}
    assert accepted == ACCEPTED
