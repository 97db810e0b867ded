"""Shows the invariants of `verl_fuse_speculation.proposer`, with batches as vLLM's model runner keeps them: rows
that move when others end."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fuse_speculation import proposer as module
from verl_fuse_speculation.engine import engine_arguments
from verl_fuse_speculation.history import History
from verl_fuse_speculation.passes import Passes
from verl_fuse_speculation.proposer import HistoryProposer
from verl_fuse_speculation.shelf import Shelf, say_step

LONGEST = 64
END = 99


class ToldProposer(HistoryProposer):
    """A proposer that writes only when told."""

    def _start_writing(self) -> None:
        """No thread."""


def proposer(folder, *, tokens=4, rank=0, epochs=2, graphs="FULL", largest=512) -> HistoryProposer:
    found = engine_arguments(tokens, 1 << 20, epochs, str(folder))
    return ToldProposer(
        SimpleNamespace(
            additional_config=found["additional_config"],
            speculative_config=SimpleNamespace(
                num_speculative_tokens=tokens, draft_load_config=SimpleNamespace(download_dir=str(folder))
            ),
            model_config=SimpleNamespace(
                max_model_len=LONGEST, hf_config=SimpleNamespace(eos_token_id=END), get_vocab_size=lambda: 1 << 20
            ),
            parallel_config=SimpleNamespace(rank=rank),
            compilation_config=SimpleNamespace(cudagraph_mode=graphs, max_cudagraph_capture_size=largest),
        )
    )


class Engine:
    """An engine that generates the samples of `asked`, verifying drafts; a sample that ends leaves its row to the last
    sample."""

    def __init__(self, drafter: HistoryProposer, asked: list[tuple[list[int], list[int]]]):
        self.drafter, self.rows = drafter, np.zeros((len(asked), LONGEST), np.int32)
        self.running = [(prompt, response, 0) for prompt, response in asked]
        self.drafts: list[list[int]] = [[] for _ in asked]
        self.passes = 0
        for row, (prompt, _, _) in enumerate(self.running):
            self.rows[row, : len(prompt)] = prompt

    def step(self) -> None:
        self.passes += 1
        sampled, lengths = [], []
        for row, (prompt, response, had) in enumerate(self.running):
            accepted = 0
            for drafted, due in zip(self.drafts[row], response[had:], strict=False):
                if drafted != due:
                    break
                accepted += 1
            new = response[had : had + accepted + 1]
            self.rows[row, len(prompt) + had : len(prompt) + had + len(new)] = new
            self.running[row] = (prompt, response, had + len(new))
            sampled.append(new)
            lengths.append(len(prompt) + had + len(new))
        self.drafts = self.drafter.propose(sampled, np.array(lengths), self.rows, slot_mappings=None)
        assert all(len(d) <= max(0, LONGEST - n - 1) for d, n in zip(self.drafts, lengths, strict=True))
        for row in reversed(range(len(self.running))):
            if self.running[row][2] == len(self.running[row][1]):
                last = self.running.pop()
                draft = self.drafts.pop()
                if row < len(self.running):
                    self.running[row], self.drafts[row] = last, draft
                    self.rows[row] = self.rows[len(self.running)]

    def leave_out(self, row: int) -> tuple:
        """The scheduler leaves a sample out: its row goes to the last one, and its drafts are dropped."""
        found = self.running[row], self.rows[row].copy()
        last, self.drafts = self.running.pop(), self.drafts[:-1]
        if row < len(self.running):
            self.running[row], self.drafts[row] = last, []
            self.rows[row] = self.rows[len(self.running)]
        return found

    def come_back(self, sample: tuple, tokens: np.ndarray) -> None:
        self.rows[len(self.running)] = tokens
        self.running.append(sample)
        self.drafts.append([])

    def run(self) -> int:
        while self.running:
            self.step()
        return self.passes


def left(drafter: HistoryProposer) -> list[list[int]]:
    """Responses that the drafter would leave for others."""
    drafter._end(set(drafter._rows.values()))
    return sorted(sample.tokens.tolist() for sample in drafter._ended)


def test_a_prompt_met_again_takes_fewer_passes(tmp_path):
    drafter = proposer(tmp_path)
    asked = [([1, 2, 3], [*range(10, 40), END])]
    assert Engine(drafter, asked).run() == 31
    assert Engine(drafter, asked).run() <= 31 / 4


def test_siblings_draft_for_each_other(tmp_path):
    response = [*range(10, 40), END]
    engine = Engine(proposer(tmp_path), [([1, 2, 3], response), ([1, 2, 3], [50, *response])])
    assert engine.run() < 32


def test_what_another_replica_left_is_drafted_from_and_so_after_a_restart(tmp_path):
    one = proposer(tmp_path, rank=0)
    response = [*range(10, 40), END]
    Engine(one, [([1, 2, 3], response)]).run()
    one._passed -= 2 * module.IDLE_SECONDS
    one.write()
    for folder_again in (tmp_path, tmp_path):
        assert Engine(proposer(folder_again), [([1, 2, 3], response)]).run() <= 31 / 4
    (passes,) = Passes(tmp_path).news().values()
    assert len(passes) == 31
    assert passes["tokens"].sum() == 31


def test_a_sample_that_goes_on_elsewhere_is_drafted_for(tmp_path):
    response = [*range(10, 40), END]
    drafter = proposer(tmp_path)
    Engine(drafter, [([1, 2, 3], response)]).run()
    moved = Engine(drafter, [([1, 2, 3, *response[:15]], response[15:])])
    assert moved.run() <= 16 / 3
    # All of its response is left, with what was generated elsewhere.
    assert left(drafter).count(response) == 2


def test_prompts_of_old_steps_are_forgotten(tmp_path):
    drafter, response = proposer(tmp_path, epochs=1), [*range(10, 40), END]
    for step, tokens in ((1, response), (2, [60, END]), (3, [61, END])):
        say_step(tmp_path, step)
        drafter._looked = -1e9
        Engine(drafter, [([1, 2, 3], tokens)]).run()
    say_step(tmp_path, 4)
    drafter._looked = -1e9
    assert Engine(drafter, [([1, 2, 3], response)]).run() == 31


def test_samples_of_steps_to_come_do_not_hide_those_of_this_step(tmp_path):
    """A run that goes on from a checkpoint finds what the run before left after it."""
    say_step(tmp_path, 9)
    one = proposer(tmp_path, epochs=0)
    Engine(one, [([1, 2, 3], [60, END])]).run()
    one._passed -= 2 * module.IDLE_SECONDS
    one.write()
    say_step(tmp_path, 5)
    drafter, asked = proposer(tmp_path, epochs=0), [([1, 2, 3], [*range(10, 40), END])]
    Engine(drafter, asked).run()
    assert Engine(drafter, asked).run() <= 31 / 4


def test_where_no_sample_goes_on_the_step_is_asked_for_at_once(tmp_path):
    drafter = proposer(tmp_path)
    Engine(drafter, [([1, 2, 3], [10, END])]).run()
    say_step(tmp_path, 2)
    drafter._looked = float("inf")
    Engine(drafter, [([4, 5, 6], [10, END])]).step()
    assert drafter._step == 2


def test_nothing_is_drafted_after_the_end(tmp_path):
    drafter = proposer(tmp_path, tokens=8)
    # vLLM's sampler goes on after an end that was accepted; the scheduler drops what it finds.
    Engine(drafter, [([1, 2, 3], [10, 11, 12, END, 50, 51])]).run()
    engine = Engine(drafter, [([1, 2, 3], [10, 11, 12, END])])
    engine.step()
    assert engine.drafts == [[11, 12, END]]


def test_nothing_is_drafted_beyond_the_longest_sequence(tmp_path):
    drafter = proposer(tmp_path, tokens=8)
    asked = [([1, 2, 3], list(range(10, 10 + LONGEST - 3)))]
    Engine(drafter, asked).run()
    engine = Engine(drafter, asked)
    seen = []
    while engine.running:
        engine.step()
        seen += [(3 + had, len(draft)) for (_, _, had), draft in zip(engine.running, engine.drafts, strict=True)]
    # The token that vLLM samples behind the last draft takes the last place.
    assert seen == [(4, 8), (13, 8), (22, 8), (31, 8), (40, 8), (49, 8), (58, LONGEST - 1 - 58)]


def test_a_sample_that_paused_is_left_once_it_has_grown(tmp_path):
    drafter = proposer(tmp_path)
    engine = Engine(drafter, [([1, 2, 3], [*range(10, 20), END])])
    engine.step()
    drafter._end(set(drafter._rows.values()))
    drafter._end(set(drafter._rows.values()))
    assert [sample.tokens.tolist() for sample in drafter._ended] == [[10]]
    engine.run()
    # What follows is left after what was left before.
    assert left(drafter) == [[10], [*range(11, 20), END]]
    assert [sample.context.tolist() for sample in drafter._ended] == [[1, 2, 3], [1, 2, 3, 10]]


def test_a_sample_that_is_left_out_of_passes_goes_on_as_the_same(tmp_path):
    drafter = proposer(tmp_path)
    asked = [([1, 2, number], [*range(10 * number, 10 * number + 9), END]) for number in (3, 4, 5)]
    engine = Engine(drafter, asked)
    engine.step()
    out = engine.leave_out(0)
    engine.step()
    engine.step()
    assert len(drafter._away) == 1
    engine.come_back(*out)
    written = drafter._history.written
    engine.step()
    assert not drafter._away
    # Nothing of it is written once more.
    assert drafter._history.written == written + 3
    engine.run()
    found = [sample for sample in left(drafter) if 30 <= sample[0] < 40]
    assert found == [[30], [*range(31, 39), END]]


def test_a_sample_that_is_left_out_of_passes_keeps_its_group_and_no_drafts(tmp_path):
    drafter = proposer(tmp_path)
    engine = Engine(drafter, [([1, 2, number], [*range(10 * number, 10 * number + 9), END]) for number in (3, 4)])
    engine.step()
    first = drafter._rows[0]
    first.tried, first.expected, first.group.newest = 3, 2.0, module.NOWHERE
    engine.leave_out(0)
    engine.step()
    assert list(drafter._away.values()) == [first]
    assert (first.tried, first.expected) == (0, 0.0)
    drafter._few = 0
    drafter._forget()
    assert drafter._groups[first.group.number] is first.group


def test_a_sample_is_known_again_after_passes_in_which_nobody_was_asked_for_drafts(tmp_path):
    drafter = proposer(tmp_path)
    asked = [([1, 2, number], [*range(10 * number, 10 * number + 9), END]) for number in (3, 4, 5)]
    engine = Engine(drafter, [(asked[0][0], [30, END]), *asked[1:]])
    engine.step()
    propose, drafter.propose = drafter.propose, lambda sampled, *args, **kwargs: [[] for _ in sampled]
    # The first ends, and the last takes its row.
    engine.step()
    drafter.propose = propose
    engine.run()
    assert [sample for sample in left(drafter) if sample[0] >= 40] == [response for _, response in asked[1:]]


def test_what_is_kept_of_prompts_and_of_samples_that_left_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FEW_PROMPTS", 16)
    monkeypatch.setattr(module, "AWAY_SAMPLES", 8)
    drafter = proposer(tmp_path)
    drafter._history = History(200)
    drafter._few = 16
    for number in range(100):
        Engine(drafter, [([1, number, 3], [*range(10, 20), END])]).run()
    assert len(drafter._away) <= 8
    assert len(drafter._groups) == len(drafter._prompts) <= 32
    # Those of which the history holds something are kept.
    assert drafter._prompts.find(np.array([1, 99, 3, 10], np.int32)).length == 3


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=3, max_size=3), st.lists(st.integers(3, 6), min_size=1, max_size=20)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_response_is_in_the_history_whichever_row_it_was_in(tmp_path_factory, asked):
    folder = tmp_path_factory.mktemp("drafter")
    drafter = proposer(folder)
    Engine(drafter, asked).run()
    found = left(drafter)
    # Samples whose tokens are the same, so far, may take each other's place.
    assert sum(map(len, found)) == sum(len(response) for _, response in asked)
    assert Shelf(folder, 1, LONGEST, 9).step() == 0


ASKED = [([1, 2, 3], [4, 5, 6, 7, END]), ([1, 2, 3], [4, 5, 6, 7, END])]


def test_workers_whose_drafts_nobody_takes_keep_nothing(tmp_path):
    other = proposer(tmp_path / "none", rank=1)
    rows = np.array([[1, 2, 3, 4, 0]], np.int32)
    assert other.propose([[4]], np.array([4]), rows) == [[]]
    assert vars(other) == {"_speaks": False}
    assert not (tmp_path / "none").exists()


def test_a_drafter_that_fails_ends_its_drafts_and_not_the_engine(tmp_path, monkeypatch, caplog):
    drafter = proposer(tmp_path)
    Engine(drafter, ASKED).step()
    monkeypatch.setattr(drafter, "_match", lambda *args: 1 / 0)
    rows = np.array([[1, 2, 3, 4, 0]], np.int32)
    for _ in range(3):
        assert drafter.propose([[4]], np.array([4]), rows) == [[]]
    assert caplog.text.count("drafting failed and ends") == 1


def test_a_step_that_goes_back_leaves_a_group_to_draft_from(tmp_path):
    say_step(tmp_path, 7)
    drafter = proposer(tmp_path)
    engine = Engine(drafter, ASKED)
    engine.step()
    say_step(tmp_path, 1)
    drafter._look()
    for group in drafter._groups.values():
        group.steps = []
    engine.step()
    assert not drafter._broken


def test_a_folder_that_cannot_be_read_costs_history_alone(tmp_path, caplog):
    drafter = proposer(tmp_path)
    (tmp_path / "step").mkdir()
    drafter._look()
    assert "cannot be read" in caplog.text
    Engine(drafter, ASKED).step()
    assert not drafter._broken


def test_a_pass_with_drafts_has_no_more_tokens_than_the_largest_graph(tmp_path):
    def drafted(largest: int, graphs: str = "FULL", rows: int = 3) -> set[int]:
        drafter = proposer(tmp_path / f"{largest}-{graphs}-{rows}", largest=999, graphs="PIECEWISE")
        # vLLM settles its graphs after it made the drafter.
        drafter._compilation.max_cudagraph_capture_size, drafter._compilation.cudagraph_mode = largest, graphs
        asked = [([1, 2, 3], [*range(10, 40), END])] * rows
        Engine(drafter, asked).run()
        engine, seen = Engine(drafter, asked), set()
        while engine.running:
            engine.step()
            seen |= {len(draft) for draft in engine.drafts}
        assert not drafter._broken
        return seen

    # 3 rows x (1 + 3) tokens.
    assert max(drafted(12)) == 3
    assert max(drafted(11)) == 2
    assert drafted(5) == {0}
    # Passes that have no graph anyway are not made smaller.
    assert max(drafted(2)) == max(drafted(512, "NONE")) == max(drafted(512)) == 4


def test_a_batch_with_more_rows_than_before_keeps_its_samples(tmp_path):
    drafter = proposer(tmp_path)
    engine = Engine(drafter, [([1, 2, number], [*range(10 * number, 10 * number + 9), END]) for number in (3, 4)])
    engine.step()
    engine.rows = np.concatenate([engine.rows, np.zeros((3, LONGEST), np.int32)])
    written = drafter._history.written
    engine.step()
    assert drafter._history.written == written + 2
    assert (drafter._away, drafter._ended) == ({}, [])


def test_where_no_draft_pays_only_a_pass_now_and_then_tries(tmp_path):
    drafter = proposer(tmp_path)
    drafter._pays = SimpleNamespace(least=1.0, observe=lambda *args: None)
    long = [*range(1, 41), END]
    tried = []
    for _ in range(3):
        engine = Engine(drafter, [([90, 91], long)])
        while engine.running:
            engine.step()
            tried.append(sum(map(len, engine.drafts)))
    probes = sum(bool(found) for found in tried)
    assert 0 < probes <= len(tried) / module.PROBE_PASSES + 1
