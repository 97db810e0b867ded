"""The measured cost of a drafter on an accelerator."""

import re
from pathlib import Path

import numpy as np
import pytest

from verl_fuse.cost.drafter import ACCEPTED, DRAFTING, FIGURES, PASSES, WITHOUT_GRAPH, added_seconds

REQUESTS = np.array([1.0, 8.0, 64.0, 256.0])


def milliseconds(requests: np.ndarray, drafted: int = 0, **settings) -> np.ndarray:
    return 1e3 * added_seconds(requests, (1 + drafted) * requests, **{"sequential": True, **settings})


def test_the_seconds_are_the_measured_ones():
    assert milliseconds(REQUESTS) == pytest.approx([4.96 - 3.4, 5.04 - 3.09, 6.44 - 4.26, 10.7 - 8.36])
    overlapped = milliseconds(REQUESTS, sequential=False)
    assert overlapped == pytest.approx([4.96 - 3.04, 5.04 - 2.89, 6.44 - 3.11, 10.7 - 5.71])


def test_between_them_the_logarithm_of_the_requests_counts_and_beyond_them_the_drafter_alone():
    work = 1e3 * DRAFTING
    low, middle, high = milliseconds(np.array([8.0, np.sqrt(8.0 * 64.0), 64.0])) - work * np.array([8, 512**0.5, 64])
    assert middle == pytest.approx((low + high) / 2)
    assert milliseconds(np.array([0.25, 1024.0])) == pytest.approx([1.56 - 0.75 * work, 2.34 + 768 * work])


def test_blocks_are_launched_one_by_one_and_a_pass_of_many_tokens_has_no_graph():
    own = 1e3 * DRAFTING * REQUESTS
    assert milliseconds(REQUESTS, blocks=56) - own == pytest.approx(2 * (milliseconds(REQUESTS) - own))
    beyond = milliseconds(REQUESTS, drafted=8) - milliseconds(REQUESTS)
    assert beyond == pytest.approx([0, 0, 28e3 * WITHOUT_GRAPH, 28e3 * WITHOUT_GRAPH])
    assert milliseconds(np.array([1024.0])) < 28e3 * WITHOUT_GRAPH, "as many have none without a drafter"


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
    assert {int(row[0]): tuple(map(float, row[1:4])) for row in rows} == PASSES
    accepted = {int(row[0]): (float(row[6]), float(row[7])) for row in rows if re.fullmatch(r"[0-9.]+", row[6])}
    assert accepted == ACCEPTED
