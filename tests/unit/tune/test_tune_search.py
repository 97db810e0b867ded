"""The search by functions in place of runs, on a clock that is counted."""

from collections.abc import Callable
from functools import cache

import pytest
import yaml
from omegaconf import OmegaConf
from tuned_run import ACTOR, ROLLOUT, run

from verl_fuse.tune.search import FLOOR, PATIENCE, Outcome, Overrides, Search, merged
from verl_fuse.tune.wanted import wanted

PACKED, BUDGET, SIZE = (
    f"{ACTOR}.{name}" for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
)
ROLLOUT_PACKED, ROLLOUT_BUDGET = f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
SEQS, WORKERS, PADDING = f"{ROLLOUT}.max_num_seqs", "reward.num_workers", "actor_rollout_ref.model.use_remove_padding"
START = 30.0
PADDED = {PACKED: False, ROLLOUT_PACKED: False, SIZE: 1, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1}


class Machine:
    """Makes trials: START seconds and 5 s a step, times the factors of the overrides it has. `kinds`: what becomes of
    trials with an override; an override in `stops` is Ctrl-C."""

    def __init__(self, factors: dict[str, float], kinds: dict[str, str] | None = None, stops: str = ""):
        self.now, self.factors, self.kinds, self.stops = 0.0, factors, kinds or {}, stops
        self.asked: list[tuple[Overrides, int, float]] = []

    def trial(self, overrides: Overrides, steps: int, limit: float) -> Outcome:
        self.asked.append((overrides, steps, limit))
        if self.stops in overrides:
            raise KeyboardInterrupt
        for override, kind in self.kinds.items():
            if override in overrides or (override == "base" and not overrides):
                self.now += limit if kind == "hung" else START / 2
                return Outcome(kind, reason="so")
        seconds = 5.0
        for override in overrides:
            seconds *= self.factors.get(override, 1.0)
        self.now += START + seconds * (steps + 1)
        return Outcome("measured", (seconds,) * steps)


def search(
    machine: Machine, *keys: str, base: dict | None = None, budget: float = 3600.0, steps: int = 3
) -> tuple[Search, list[Overrides]]:
    """Return the search, and the overrides of its trials."""

    @cache
    def candidates(overrides: Overrides):
        config = OmegaConf.create(run(base))
        for override in overrides:
            key, _, value = override.lstrip("+").partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
        return wanted(config, keys, ())

    found = Search(candidates, machine.trial, steps=steps, budget=budget, clock=lambda: machine.now)
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


def test_what_is_faster_is_kept_and_the_rest_tried_beside_it():
    _, made = search(Machine({f"{SEQS}=32": 0.5}), SEQS, WORKERS)
    # The largest first; of workers the one nearest to 8. Of 16 and 8 requests neither is faster.
    assert made[:4] == [(), (f"{SEQS}=32",), (f"{SEQS}=32", f"{WORKERS}=16"), (f"{SEQS}=16",)]
    assert all(set(overrides) != {f"{SEQS}=32", f"{SEQS}=16"} for overrides in made)


def test_the_value_that_the_base_has_is_not_tried_after_a_change():
    _, made = search(Machine({f"{SEQS}=32": 0.5, f"{PADDING}=false": 0.5}), SEQS, PADDING, base={SEQS: 8})
    assert made[:4] == [(), (f"{SEQS}=32",), (f"{SEQS}=32", f"{PADDING}=false"), (f"{SEQS}=16", f"{PADDING}=false")]
    assert not any(override in overrides for overrides in made for override in (f"{SEQS}=8", f"{PADDING}=true"))


def test_a_change_that_gains_too_little_to_be_told_from_noise_is_not_kept():
    found, made = search(Machine({f"{SEQS}=32": 0.99}), SEQS, WORKERS)
    assert made[2] == (f"{WORKERS}=16",)
    assert not any(trial.turn for trial in found.trials)


def test_nothing_better_needs_no_finals_and_tries_each_value_once():
    found, made = search(Machine({}), SEQS, WORKERS)
    values = {SEQS: (8, 16, 32), WORKERS: (1, 2, 4, 16, 32, 64)}
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


def test_a_key_that_has_gone_out_of_play_is_not_tried():
    _, made = search(Machine({f"{PACKED}=true": 0.5}), PACKED, SIZE, base=PADDED)
    assert {override for overrides in made for override in overrides if override.startswith(SIZE)} == set()


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
    assert [trial.turn for trial in many.trials] == [0, 0, 0, 0, 1, 1, 1, 2, 2]


def test_finalists_and_base_are_measured_in_turn_with_twice_the_steps_then_backwards():
    machine = Machine({f"{SEQS}=32": 0.5, f"{SEQS}=16": 0.7})
    search(machine, SEQS)
    finals = [(overrides, steps) for overrides, steps, _ in machine.asked[4:]]
    first, second = (f"{SEQS}=32",), (f"{SEQS}=16",)
    assert finals == [((), 6), (first, 6), (second, 6), (first, 6), ((), 6)]


def test_a_finalist_that_fails_in_the_finals_is_out():
    def failing(machine: Machine) -> Callable[[Overrides, int, float], Outcome]:
        made = machine.trial
        return lambda overrides, steps, limit: (
            Outcome("crashed", reason="so")
            if steps == 6 and f"{SEQS}=32" in overrides
            else made(overrides, steps, limit)
        )

    machine = Machine({f"{SEQS}=32": 0.5, f"{SEQS}=16": 0.7})
    machine.trial = failing(machine)
    _, made = search(machine, SEQS)
    assert made[-2:] == [(f"{SEQS}=16",), ()]


@pytest.mark.parametrize("stopped", [f"{SEQS}=32", f"{WORKERS}=16"])
def test_ctrl_c_leaves_what_is_known(stopped: str):
    found, made = search(Machine({f"{SEQS}=32": 0.5}, stops=stopped), SEQS, WORKERS)
    assert found.interrupted
    assert made == [(), (f"{SEQS}=32",)][: 1 if stopped.startswith(SEQS) else 2]


def test_a_key_that_was_added_is_added_again_with_its_next_value():
    assert merged(("++a=1", "b=2"), ("a=3", "c=4")) == ("++a=3", "b=2", "c=4")
    assert merged(("a=1",), ("++d=1", "a=2")) == ("a=2", "++d=1")
