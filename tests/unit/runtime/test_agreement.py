"""The invariants in the docstring of verl_fuse/runtime/agreement.py."""

from verl_fuse.runtime.agreement import Offer, disagreement
from verl_fuse.runtime.blame import Verdict

SAME = Offer(("a", "b", "c"), {})


def test_equal_offers_agree():
    ends = {0: Offer(("a",), {"0F 0>1": "x"}), 1: Offer(("a",), {"0F 0>1": "x", "0F 1>2": "y"})}
    assert disagreement({**ends, 2: Offer(("a",), {"0F 1>2": "y"})}) is None


def test_the_minority_is_to_blame_and_the_rows_are_named():
    offers = {0: SAME, 1: SAME, 2: Offer(("a", "x", "c"), {}), 3: SAME}
    assert disagreement(offers) == Verdict(
        (2,), "op lists differ: ranks 0, 1, 3 against rank 2, in the op list of rank 1"
    )


def test_the_minority_is_to_blame_where_it_has_the_first_rank():
    other = Offer(("a", "x", "c"), {})
    verdict = disagreement({0: other, 1: SAME, 2: SAME})
    assert verdict is not None
    assert verdict.culprits == (0,)


def test_without_a_majority_all_are_to_blame():
    assert disagreement({0: SAME, 1: Offer(("a", "b"), {})}) == Verdict(
        (0, 1), "op lists differ: rank 0 against rank 1, in the op list of rank 2"
    )


def test_three_ways_to_differ():
    verdict = disagreement({0: Offer(("a",), {}), 1: Offer(("b",), {}), 2: Offer(("a",), {}), 3: Offer(("c",), {})})
    assert verdict is not None
    assert verdict.culprits == (1, 3)


def test_both_ends_of_a_connection_that_differ_are_to_blame():
    offers = {
        1: Offer(("a",), {"0B 2>1": "x"}),
        2: Offer(("a",), {"0B 2>1": "y", "0B 3>2": "z"}),
        3: Offer(("a",), {"0B 3>2": "z"}),
    }
    assert disagreement(offers) == Verdict(
        (1, 2), "ranks 1, 2 expect different messages on connection 0B 2>1 (pipeline, kind, ranks)"
    )


def test_offers_survive_the_store():
    offer = Offer(("a", "b"), {"0F 0>1": "x"})
    assert Offer.from_json(offer.to_json()) == offer
