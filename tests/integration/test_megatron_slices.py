"""The Megatron copies of a slice compute what the models of verl's own workers compute, however the two are cut.

Real workers of verl on Megatron, four gloo processes of the cpu platform. Shows the invariants in the docstrings of
plugins/verl_fuse_interstage/slices/megatron_copies.py and verl_fuse/host/weights/whole_megatron.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).parent / "support"))
from slice_copies import STAGES
from sliced_megatron import configuration, numbers, write_models
from small_engines import Ranks, cpu_server

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

ACTOR, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"
RANKS = 4
POLICY = ("old_log_prob", "ref")
FIELDS = {"old_log_probs", "entropy", "ref_log_prob"}


def cut(tp: int, pp: int) -> list[str]:
    return [
        f"{block}.{kind}_model_parallel_size={size}"
        for block in (ACTOR, CRITIC)
        for kind, size in (("tensor", tp), ("pipeline", pp))
    ]


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with cpu_server():
        yield


def furthest(pairs: list) -> float:
    return max(float(np.abs(a - b).max()) for own, copied in pairs for a, b in zip(own, copied, strict=True))


@pytest.mark.parametrize(
    ("family", "options", "stages", "trained", "cuts"),
    [
        # By devices of a slice, (tp, pp) of its copies.
        ("llama", {}, STAGES, (2, 2), {2: (2, 1), 4: (2, 2)}),
        # Biases; a head that is tied, of which the last stage has a copy.
        ("qwen2", {"tie_word_embeddings": True}, POLICY, (1, 2), {1: (1, 1), 2: (1, 2)}),
    ],
)
def test_copies_compute_the_numbers_of_their_models_however_they_are_cut(
    tmp_path, family, options, stages, trained, cuts
):
    write_models(tmp_path, family, options)
    with Ranks(RANKS) as ranks:
        found = ranks.call(numbers, configuration(tmp_path), cut(*trained), stages, list(cuts))[0]
    assert {count: found[count]["cut"] for count in cuts} == cuts
    for count in cuts:
        far = {field: furthest(pairs) for field, pairs in found[count]["numbers"].items()}
        assert far.keys() == FIELDS | ({"values"} if "values" in stages else set())
        print(cuts[count], far)
        assert set(far.values()) == {0.0}, (count, far)
        sizes = [pair for of in found[count]["sizes"] for pair in of.values()]
        assert [has for has, _ in sizes] == [said for _, said in sizes], "the bytes that are counted before start"
        assert min(has for has, _ in sizes) > 0
    assert found["left"] == found["said to be left"]
