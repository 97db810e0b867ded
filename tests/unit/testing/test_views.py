"""Views of `verl_fuse.testing`: what a test asks for, and refusals of what no run has."""

import subprocess
import sys

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import Capacity, LaneView, ReplicaView, Sample
from verl_fuse.testing import lane, prompts, replicas, samples, view


def test_samples_have_the_keys_of_verl():
    assert samples([8, 9, 7], prompt=3, each=2) == (
        Sample("g0_0_0", "g0", 3, 8),
        Sample("g0_1_0", "g0", 3, 9),
        Sample("g1_0_0", "g1", 3, 7),
    )


def test_a_view_counts_what_it_shows():
    ready = samples([8, 9])
    shown = view(ready, lanes=[lane()], replicas=replicas([3, 1], unmovable=[0, 1]))
    assert (shown.finished, shown.expected, shown.unfinished, shown.groups) == (2, 2, 0, 2)
    assert shown.lanes == (LaneView("train", ("old_log_prob", "ref"), 0, 1),)
    assert shown.replicas == (
        ReplicaView(0, 3, 8, True, capacity=Capacity(8)),
        ReplicaView(1, 1, 8, True, unmovable=1, capacity=Capacity(8)),
    )
    later = view(ready, finished=12, expected=16, complete=samples([5, 5], each=2))
    assert (later.unfinished, len(later.complete)) == (4, 2)


def test_prompts_are_predicted_or_not():
    assert prompts([50.0, None], samples=4, spread=1.5) == [
        Prompt("u0", "k0", "math", 4, Prediction(50.0, 75.0)),
        Prompt("u1", "k1", "math", 4),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ready": samples([8]) * 2}, r"sample 'g0_0_0' is ready twice; needs keys of its own"),
        ({"ready": samples([8, 9]), "finished": 1}, r"2 samples in the view, finished=1, expected=1; needs samples <="),
        (
            {"finished": 9, "expected": 8},
            r"0 samples in the view, finished=9, expected=8; needs .* finished <= expected",
        ),
    ],
)
def test_what_no_run_has_is_refused(given: dict, message: str):
    with pytest.raises(FuseError, match=message):
        view(**given)


def test_it_imports_neither_torch_nor_ray_nor_verl():
    code = "import sys, verl_fuse.testing; print(sorted({'torch', 'ray', 'verl', 'vllm', 'hydra'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout == "[]\n"
