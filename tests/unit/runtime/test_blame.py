"""The invariants in the docstring of verl_fuse/runtime/blame.py."""

from verl_fuse.runtime.blame import RankState, Verdict, blame

NOW = 100.0


def waits(what: str, since: float, *peers: int, program: int = 5) -> RankState:
    return RankState("waits", what, since, program, peers)


def runs(what: str, since: float, program: int = 5) -> RankState:
    return RankState("runs", what, since, program)


def test_the_rank_at_the_end_of_the_chain_is_to_blame():
    states = {0: waits("0F3", 90, 1), 1: waits("0F3", 91, 2), 2: runs("1B0", 88), 3: runs("0F0", 99)}
    assert blame(states, [], 0, NOW) == Verdict(
        (2,), "rank 0 waited 10.0 s for 0F3 from rank 1: rank 2 has been running 1B0 for 12.0 s"
    )


def test_a_rank_that_never_came_is_to_blame():
    states = {
        0: waits("agreement", 95, 1, 2),
        1: waits("agreement", 95, 0, 2),
        2: runs("what follows program 4", 80, program=4),
    }
    assert blame(states, [], 1, NOW) == Verdict(
        (2,),
        "rank 1 waited 5.0 s for agreement from rank 0, 2: rank 2 has not started this program; "
        "it has been running what follows program 4 for 20.0 s",
    )


def test_a_rank_that_is_ahead_is_not_late():
    states = {
        0: waits("0F3", 90, 1),
        1: waits("0F0", 92, 2, program=6),
        2: runs("what follows program 4", 80, program=4),
    }
    assert blame(states, [], 0, NOW) == Verdict(
        (2,),
        "rank 0 waited 10.0 s for 0F3 from rank 1: rank 2 has not started this program; "
        "it has been running what follows program 4 for 20.0 s",
    )


def test_nobody_that_a_late_rank_waited_for_is_asked():
    states = {0: waits("0F3", 90, 1), 1: waits("0B9", 80, 2, program=4), 2: runs("0F0", 99)}
    assert blame(states, [], 0, NOW).culprits == (1,)


def test_several_can_be_to_blame():
    states = {0: waits("completion", 95, 1, 2), 1: runs("0B3", 97), 2: runs("1B0", 97)}
    assert blame(states, [], 0, NOW).culprits == (1, 2)


def test_a_silent_process_is_to_blame_whatever_it_said_last():
    states = {0: waits("0F3", 90, 1), 1: runs("0F3", 90), 2: waits("1F0", 88, 1)}
    assert blame(states, [2], 0, NOW) == Verdict(
        (2,),
        "rank 0 waited 10.0 s for 0F3 from rank 1: rank 2 has been waiting for 1F0 for 12.0 s, and its process does "
        "not answer",
    )


def test_ranks_that_wait_for_each_other_are_all_to_blame():
    states = {0: waits("0F3", 90, 1), 1: waits("1F3", 90, 2), 2: waits("2F3", 90, 1), 3: runs("0F0", 90)}
    verdict = blame(states, [], 0, NOW)
    assert verdict.culprits == (1, 2)
    assert "rank 1 has been waiting for 1F3 for 10.0 s; rank 2 has been waiting for 2F3 for 10.0 s" in verdict.text


def test_states_and_verdicts_survive_the_store():
    state, verdict = waits("0F3", 1.5, 1, 2), Verdict((1, 2), "both")
    assert RankState.from_json(state.to_json()) == state
    assert Verdict.from_json(verdict.to_json().encode()) == verdict
