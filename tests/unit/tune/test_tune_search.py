"""The search by functions in place of runs, on a clock that is counted."""

import math
from collections.abc import Callable
from functools import cache

import pytest
import yaml
from omegaconf import OmegaConf
from tuned_run import ACTOR, ROLLOUT, run

from verl_fuse.tune.search import FLOOR, PATIENCE, Request, Search
from verl_fuse.tune.trial import Outcome, Overrides, merged
from verl_fuse.tune.wanted import wanted

PACKED, BUDGET, SIZE = (
    f"{ACTOR}.{name}" for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
)
ROLLOUT_PACKED, ROLLOUT_BUDGET = f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
SEQS, WORKERS, PADDING = f"{ROLLOUT}.max_num_seqs", "reward.num_workers", "actor_rollout_ref.model.use_remove_padding"
TWIN = f"{ACTOR}.ulysses_sequence_parallel_size"
SHARED = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
START = 30.0
PADDED = {PACKED: False, ROLLOUT_PACKED: False, SIZE: 1, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1}


class Machine:
    """Makes trials: START seconds and 5 s a step, times the factors of the overrides it has; a replayed step 3 s.
    `kinds`: what becomes of trials with an override, or of all that are "replayed"; an override in `stops` is
    Ctrl-C."""

    def __init__(self, factors: dict[str, float], kinds: dict[str, str] | None = None, stops: str = ""):
        self.now, self.factors, self.kinds, self.stops = 0.0, factors, kinds or {}, stops
        self.asked: list[tuple[Overrides, int, float]] = []
        # (overrides, steps) of those that recorded.
        self.recorded: list[tuple[Overrides, int]] = []

    def trial(self, asked: Request) -> Outcome:
        overrides, steps, limit = asked.overrides, asked.steps, asked.limit
        self.asked.append((overrides, steps, limit))
        self.recorded += [(overrides, steps)] if asked.records else []
        if self.stops in overrides:
            raise KeyboardInterrupt
        for override, kind in self.kinds.items():
            told = {"base": not overrides, "replayed": asked.replayed}
            if told.get(override, override in overrides):
                self.now += limit if kind == "hung" else START / 2
                return Outcome(kind, reason="so")
        seconds = 3.0 if asked.replayed else 5.0
        for override in overrides:
            seconds *= self.factors.get(override, 1.0)
        self.now += START + seconds * (steps + 1)
        return Outcome("measured", (seconds,) * steps)


def search(
    machine: Machine,
    *keys: str,
    base: dict | None = None,
    budget: float = 3600.0,
    steps: int = 3,
    replays: Callable[[int], bool] = lambda steps: False,
    ratio: Callable[[Overrides, Overrides, bool], float | None] = lambda one, other, replayed: None,
    dependent: bool = False,
    allow: tuple[str, ...] = (),
) -> tuple[Search, list[Overrides]]:
    """Return the search from a run with few requests at once, and the overrides of its trials. With `dependent` keys
    that are not asked for follow."""

    @cache
    def candidates(overrides: Overrides, keys: tuple[str, ...] = keys):
        config = OmegaConf.create(run({SEQS: 8} | (base or {})))
        for override in overrides:
            key, _, value = override.lstrip("+").partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
        return wanted(config, keys, allow)

    found = Search(
        candidates,
        machine.trial,
        steps=steps,
        budget=budget,
        dependents=(lambda overrides: candidates(overrides, ())) if dependent else None,
        replays=replays,
        ratio=ratio,
        clock=lambda: machine.now,
    )
    found.run()
    return found, [trial.overrides for trial in found.trials]


def test_the_base_comes_first_and_ends_it_where_it_fails():
    for kind in ("crashed", "out_of_memory", "hung", "refused"):
        found, made = search(Machine({}, {"base": kind}))
        assert (made, found.trials[0].outcome.kind) == ([()], kind)


def test_the_base_may_take_the_whole_budget_and_others_three_times_the_base():
    machine = Machine({})
    search(machine, WORKERS, budget=600)
    base = START + 5.0 * 4
    assert [limit for _, _, limit in machine.asked[:3]] == [600.0, *[PATIENCE * base + FLOOR] * 2]


def test_what_is_predicted_to_save_most_comes_first_and_what_costs_last():
    """What saves less than 2 % is taken in the order, as what is not known."""
    known = {f"{SEQS}=32": 1.06, f"{SEQS}=16": 0.982, f"{PADDING}=true": 0.6, f"{WORKERS}=16": 0.8}

    def ratio(one: Overrides, other: Overrides, replayed: bool) -> float | None:
        changed = {*other} - {*one}
        return math.prod(known[each] for each in changed) if changed <= known.keys() and {*one} <= {*other} else None

    found, made = search(Machine({f"{PADDING}=true": 0.5}), SEQS, PADDING, WORKERS, base={PADDING: False}, ratio=ratio)
    best = f"{PADDING}=true"
    assert made[:4] == [(), (best,), (best, f"{WORKERS}=16"), (best, f"{SEQS}=16")]
    climb = [trial for trial in found.trials if not trial.turn]
    assert climb[-1].overrides == (best, f"{SEQS}=32")
    # Against the base, and then against the best so far as measured.
    assert [trial.predicted for trial in climb[:4]] == [None, 3.0, 2.0, pytest.approx(2.455)]
    assert {trial.predicted for trial in climb[4:-1]} == {None}
    # Of the finals only the base has nothing to predict; the best itself is predicted from the base.
    assert [trial.predicted for trial in found.trials if trial.turn] == [None, 3.0, 2.0, 3.0, None]


def test_replays_are_predicted_from_replays():
    machine = Machine({f"{PACKED}=true": 0.5})
    base = {**PADDED, SEQS: 8}
    found, _ = search(machine, PACKED, base=base, replays=lambda steps: True, ratio=lambda one, other, replayed: 2 / 3)
    told = [(trial.overrides != (), trial.replayed, trial.predicted) for trial in found.trials[:3]]
    assert told == [(False, False, None), (False, True, None), (True, True, 2.0)]


def test_what_is_faster_is_kept_and_the_rest_tried_beside_it():
    found, made = search(Machine({f"{SEQS}=32": 0.5}), SEQS, WORKERS)
    # The largest first; of workers the one nearest to 8, each once before the second of any.
    assert made[:4] == [(), (f"{SEQS}=32",), *((f"{SEQS}=32", f"{WORKERS}={value}") for value in (16, 32))]
    # What is expected to be slower comes last.
    before_finals = [trial.overrides for trial in found.trials if not trial.turn]
    assert before_finals[-2:] == [(f"{SEQS}=32", f"{WORKERS}=1"), (f"{SEQS}=16",)]
    assert all(set(overrides) != {f"{SEQS}=32", f"{SEQS}=16"} for overrides in made)


def test_the_value_that_the_base_has_is_not_tried_after_a_change():
    _, made = search(Machine({f"{SEQS}=32": 0.5, f"{PADDING}=true": 0.5}), SEQS, PADDING, base={PADDING: False})
    assert made[:4] == [(), (f"{SEQS}=32",), (f"{SEQS}=32", f"{PADDING}=true"), (f"{SEQS}=16", f"{PADDING}=true")]
    assert not any(override in overrides for overrides in made for override in (f"{SEQS}=8", f"{PADDING}=false"))


def test_a_change_that_gains_too_little_to_paste_is_not_kept():
    found, made = search(Machine({f"{SEQS}=32": 0.99}), SEQS, WORKERS)
    assert made[2] == (f"{WORKERS}=16",)
    assert not any(trial.turn for trial in found.trials)


def test_nothing_better_needs_no_finals_and_tries_each_value_once():
    found, made = search(Machine({}), SEQS, WORKERS)
    values = {SEQS: (16, 32), WORKERS: (1, 2, 4, 16, 32, 64)}
    assert set(made) == {(), *((f"{key}={value}",) for key, tried in values.items() for value in tried)}
    assert len(made) == len(set(made))
    assert not found.interrupted


def test_keys_that_a_change_brings_into_play_get_a_value_that_can_stay_and_are_tried_themselves():
    factors = {f"{PACKED}=true": 0.5, f"{BUDGET}=4008": 0.5}
    _, made = search(Machine(factors), PACKED, BUDGET, ROLLOUT_BUDGET, base={**PADDED, BUDGET: 256})
    together = (f"{PACKED}=true", f"{ROLLOUT_PACKED}=true")
    # 256 tokens do not hold the longest sequence, and 16384 are more than all rows of a rank have.
    assert made[1] == (*together, f"{BUDGET}=8016", f"{ROLLOUT_BUDGET}=16032")
    best = (*together, f"{BUDGET}=4008", f"{ROLLOUT_BUDGET}=16032")
    assert best in made
    assert (*together, f"{BUDGET}=4008", f"{ROLLOUT_BUDGET}=8016") in made


def test_budgets_that_are_not_asked_for_hold_the_longest_sequence_all_the_same():
    """Packing brings the base's own budgets into play, and other ranks may no longer share a sequence."""
    together = (f"{PACKED}=true", f"{ROLLOUT_PACKED}=true")
    small = {BUDGET: 256, ROLLOUT_BUDGET: 256}
    _, made = search(Machine({}), PACKED, base={**PADDED, **small}, dependent=True)
    assert made[1] == (*together, f"{BUDGET}=8016", f"{ROLLOUT_BUDGET}=16032")
    # Those that hold it stay.
    _, made = search(Machine({}), PACKED, base={**PADDED, BUDGET: 16384, ROLLOUT_BUDGET: 256}, dependent=True)
    assert made[1] == (*together, f"{ROLLOUT_BUDGET}=16032")
    # 501 tokens are the longest.
    small = {BUDGET: 300, ROLLOUT_BUDGET: 501, SHARED: 2, TWIN: 2}
    _, made = search(Machine({}), SHARED, base=small, dependent=True, allow=("cuts_mini_batches", "ends_resume"))
    assert (f"{SHARED}=1", f"{TWIN}=1", f"{BUDGET}=501") in made
    assert not any(f"{ROLLOUT_BUDGET}" in override for overrides in made for override in overrides)


def test_a_key_that_has_gone_out_of_play_is_not_tried():
    _, made = search(Machine({f"{PACKED}=true": 0.5}), PACKED, SIZE, base=PADDED)
    assert made[1:3] == [(f"{SIZE}=8",), (f"{PACKED}=true", f"{ROLLOUT_PACKED}=true")]
    assert {override for overrides in made[2:] for override in overrides if override.startswith(SIZE)} == set()


def test_after_one_that_was_out_of_memory_the_next_smaller_one_comes_first():
    large = {f"{SIZE}={size}": "out_of_memory" for size in (8, 4)}
    _, made = search(Machine({}, large), SIZE, SEQS, base=PADDED)
    assert made[1:5] == [(f"{SIZE}=8",), (f"{SIZE}=4",), (f"{SIZE}=2",), (f"{SEQS}=32",)]


@pytest.mark.parametrize("kind", ["crashed", "hung", "refused", "out_of_memory"])
def test_a_trial_that_fails_is_a_result_and_not_the_end(kind: str):
    found, made = search(Machine({f"{WORKERS}=16": 0.5}, {f"{SEQS}=32": kind}), SEQS, WORKERS)
    assert found.trials[1].outcome == Outcome(kind, reason="so")
    assert (f"{WORKERS}=16",) in made
    assert found.trials[-1].turn == 2


@pytest.mark.parametrize("budget", [120.0, 200.0, 300.0, 480.0, 900.0])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_no_trial_begins_that_would_end_after_the_budget(budget: float, factor: float):
    machine = Machine({f"{SEQS}=32": factor, f"{WORKERS}=16": factor})
    found, _ = search(machine, SEQS, WORKERS, PADDING, budget=budget)
    assert machine.now <= budget
    assert len(found.trials) > 1
    if factor < 1 and budget >= 300:
        assert found.trials[-1].turn


def test_a_budget_for_two_trials_has_no_finals_and_a_large_one_both_turns():
    few, _ = search(Machine({f"{SEQS}=32": 0.5}), SEQS, budget=120.0)
    assert [trial.turn for trial in few.trials] == [0, 0]
    many, _ = search(Machine({f"{SEQS}=32": 0.5, f"{SEQS}=16": 0.7}), SEQS, budget=3600.0)
    assert [trial.turn for trial in many.trials] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_finalists_and_base_are_measured_in_turn_with_twice_the_steps_then_backwards():
    machine = Machine({f"{SEQS}=32": 0.5, f"{SEQS}=16": 0.7})
    search(machine, SEQS)
    finals = [(overrides, steps) for overrides, steps, _ in machine.asked[3:]]
    first, second = (f"{SEQS}=32",), (f"{SEQS}=16",)
    assert finals == [((), 6), (first, 6), (second, 6), (first, 6), ((), 6)]


def test_finalists_of_the_trained_side_alone_replay_what_the_base_records_for_them():
    factors = {f"{BUDGET}=8016": 0.5, f"{BUDGET}=4008": 0.7}
    best, second = (f"{BUDGET}=8016",), (f"{BUDGET}=4008",)
    machine = Machine(factors)
    found, _ = search(machine, BUDGET, base={BUDGET: 501}, replays=lambda steps: True)
    finals = [(each.overrides, each.replayed, each.turn) for each in found.trials if each.turn]
    assert finals == [
        ((), False, 1),
        *((each, True, 1) for each in ((), best, second)),
        *((each, True, 2) for each in (best, ())),
    ]
    assert machine.recorded == [((), 3), ((), 6)]
    # Two trials have room beside those of the search, but not three.
    for budget, replayed in ((300.0, {False, True}), (290.0, {False})):
        found, _ = search(Machine(factors), BUDGET, base={BUDGET: 501}, budget=budget, replays=lambda steps: True)
        assert {each.replayed for each in found.trials if each.turn} == replayed
    # A key of the rollout that gained nothing beside what was kept is left out.
    machine = Machine(factors)
    found, _ = search(machine, BUDGET, WORKERS, base={BUDGET: 501}, replays=lambda steps: True)
    assert {each.overrides for each in found.trials if each.turn} == {(), best, second}
    assert machine.recorded == [((), 3), ((), 6)]
    # Where not all steps were recorded, or a key of the rollout was kept, all generate.
    found, _ = search(Machine(factors), BUDGET, base={BUDGET: 501}, replays=lambda steps: steps == 3)
    assert [each.replayed for each in found.trials if each.turn] == [False] * 6
    machine = Machine(factors | {f"{SEQS}=32": 0.5})
    found, _ = search(machine, BUDGET, SEQS, base={BUDGET: 501}, replays=lambda steps: True)
    assert not any(each.replayed for each in found.trials if each.turn)
    assert machine.recorded == [((), 3)]


@pytest.mark.parametrize(("factor", "steps"), [(1.0, 6), (0.47, 6), (0.46, 7), (0.27, 11), (0.26, 12), (0.01, 12)])
def test_finals_have_up_to_four_times_the_steps_where_a_start_takes_longer(factor: float, steps: int):
    """A start has 30 s and a step of warm-up; steps of 5 s that take half of it would be 3."""
    factors = {f"{SEQS}=32": 0.5}
    machine = Machine(factors)
    made = machine.trial

    def trial(asked: Request) -> Outcome:
        found, begun = made(asked), machine.now
        machine.now = begun - (1 - factor) * sum(found.seconds) * (asked.steps + 1) / asked.steps
        return Outcome("measured", tuple(factor * each for each in found.seconds))

    machine.trial = trial
    found, _ = search(machine, SEQS)
    assert {len(each.outcome.seconds) for each in found.trials if each.turn} == {steps}
    assert {len(each.outcome.seconds) for each in found.trials if not each.turn} == {3}


def test_a_finalist_that_fails_in_the_finals_is_out():
    def failing(machine: Machine) -> Callable[[Request], Outcome]:
        made = machine.trial
        return lambda asked: (
            Outcome("crashed", reason="so") if asked.steps == 6 and f"{SEQS}=32" in asked.overrides else made(asked)
        )

    machine = Machine({f"{SEQS}=32": 0.5, f"{SEQS}=16": 0.7})
    machine.trial = failing(machine)
    _, made = search(machine, SEQS)
    assert made[-2:] == [(f"{SEQS}=16",), ()]


def modes(found: Search) -> list[tuple[Overrides, bool]]:
    """Return (overrides, whether replayed) of the trials before the finals."""
    return [(trial.overrides, trial.replayed) for trial in found.trials if not trial.turn]


def test_the_trained_side_is_compared_by_replays_and_the_rollout_live():
    factors = {f"{BUDGET}=8016": 0.5, f"{SEQS}=32": 0.5, f"{PADDING}=true": 0.5}
    base = {BUDGET: 501, PADDING: False}
    found, made = search(Machine(factors), BUDGET, SEQS, PADDING, base=base, replays=lambda steps: True)
    budget, requests, padding = (f"{BUDGET}=8016",), (f"{SEQS}=32",), (f"{PADDING}=true",)
    assert modes(found)[:7] == [
        ((), False),
        # The base is replayed once, to compare with it, and what was kept is measured live before the rollout is.
        ((), True),
        (budget, True),
        (budget, False),
        (budget + requests, False),
        # The rollout's keys are in no replay.
        (budget + padding, True),
        ((f"{BUDGET}=4008", *padding), True),
    ]
    # The finals have all of it, also where no trial had.
    assert made[-1] == ()
    assert set(made[-2]) == {*budget, *requests, *padding}


def test_without_replays_all_trials_are_live():
    found, _ = search(Machine({f"{BUDGET}=8016": 0.5}), BUDGET, base={BUDGET: 501})
    assert not any(trial.replayed for trial in found.trials)


def test_where_the_base_s_own_replay_fails_trials_are_live():
    found, _ = search(
        Machine({f"{BUDGET}=8016": 0.5}, {"replayed": "crashed"}),
        BUDGET,
        base={BUDGET: 501},
        replays=lambda steps: True,
    )
    assert modes(found)[:3] == [((), False), ((), True), ((f"{BUDGET}=8016",), False)]
    assert found.trials[-1].turn == 2


def test_after_recorded_rollouts_are_gone_trials_are_live():
    machine = Machine({f"{BUDGET}=8016": 0.5})
    made, recorded = machine.trial, [True]

    def trial(asked: Request) -> Outcome:
        if not asked.replayed or not asked.overrides:
            return made(asked)
        recorded.clear()
        return Outcome("refused", reason="so")

    machine.trial = trial
    found, _ = search(machine, BUDGET, SEQS, base={BUDGET: 501}, replays=lambda steps: bool(recorded))
    assert modes(found)[:5] == [
        ((), False),
        ((), True),
        ((f"{BUDGET}=8016",), True),
        ((f"{SEQS}=32",), False),
        ((f"{BUDGET}=4008",), False),
    ]


def test_what_was_kept_by_replays_and_fails_live_is_given_up():
    machine = Machine({f"{BUDGET}=8016": 0.5})
    made = machine.trial
    machine.trial = lambda asked: (
        made(asked) if asked.replayed or not asked.overrides else Outcome("out_of_memory", reason="so")
    )
    found, _ = search(machine, BUDGET, SEQS, base={BUDGET: 501}, replays=lambda steps: True)
    assert modes(found)[2:5] == [((f"{BUDGET}=8016",), True), ((f"{BUDGET}=8016",), False), ((f"{SEQS}=32",), False)]


def noisy(machine: Machine, shakes: Callable[[Request], bool]) -> Machine:
    """Let steps vary by a tenth in trials that `shakes` names."""
    made = machine.trial

    def trial(asked: Request) -> Outcome:
        found = made(asked)
        if found.kind != "measured" or not shakes(asked):
            return found
        return Outcome("measured", tuple(each * (1.1, 0.9, 1.0)[step % 3] for step, each in enumerate(found.seconds)))

    machine.trial = trial
    return machine


def test_a_gain_in_doubt_is_measured_again_with_more_steps_once_the_good_guesses_were_tried():
    machine = noisy(Machine({f"{SEQS}=32": 0.9}), lambda asked: asked.steps == 3 and f"{SEQS}=32" in asked.overrides)
    search(machine, SEQS, WORKERS, PADDING, base={PADDING: False})
    asked = [(overrides, steps) for overrides, steps, _ in machine.asked]
    requests, padding = (f"{SEQS}=32",), (f"{PADDING}=true",)
    assert asked[:6] == [
        ((), 3),
        (requests, 3),
        (padding, 3),
        ((), 6),
        (requests, 6),
        ((*requests, f"{WORKERS}=16"), 3),
    ]


def test_a_gain_that_stays_in_doubt_is_not_kept():
    machine = noisy(Machine({f"{SEQS}=32": 0.95}), lambda asked: f"{SEQS}=32" in asked.overrides)
    found, made = search(machine, SEQS, WORKERS)
    assert made[:5] == [(), (f"{SEQS}=32",), (), (f"{SEQS}=32",), (f"{WORKERS}=16",)]
    # More steps than these are those of the finals.
    assert [trial.overrides for trial in found.trials if trial.turn] == [(), (f"{SEQS}=32",), (f"{SEQS}=32",), ()]


def test_keys_of_one_pattern_change_together_and_smaller_where_memory_ends():
    both = (f"{BUDGET}=8016", f"{ROLLOUT_BUDGET}=16032"), (f"{BUDGET}=4008", f"{ROLLOUT_BUDGET}=8016")
    machine = Machine({f"{BUDGET}=4008": 0.5}, {f"{ROLLOUT_BUDGET}=16032": "out_of_memory"})
    _, made = search(machine, BUDGET, ROLLOUT_BUDGET, SEQS, base={BUDGET: 501, ROLLOUT_BUDGET: 501})
    assert made[1:4] == [*both, (*both[1], f"{SEQS}=32")]


@pytest.mark.parametrize("stopped", [f"{SEQS}=32", f"{WORKERS}=16"])
def test_ctrl_c_leaves_what_is_known(stopped: str):
    found, made = search(Machine({f"{SEQS}=32": 0.5}, stops=stopped), SEQS, WORKERS)
    assert found.interrupted
    assert made == [(), (f"{SEQS}=32",)][: 1 if stopped.startswith(SEQS) else 2]


def test_a_key_that_was_added_is_added_again_with_its_next_value():
    assert merged(("++a=1", "b=2"), ("a=3", "c=4")) == ("++a=3", "b=2", "c=4")
    assert merged(("a=1",), ("++d=1", "a=2")) == ("a=2", "++d=1")
