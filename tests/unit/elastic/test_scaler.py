"""Decisions of the scaler before and after decoding has been measured, and its predictions."""

from dataclasses import replace

import pytest

from verl_fuse.spec.prompts import Prediction, Prompt
from verl_fuse.spec.step import Capacity, ReplicaView
from verl_fuse.timeline.decode import DecodeCost
from verl_fuse_elastic.config import ElasticConfig
from verl_fuse_elastic.corrections import Corrections
from verl_fuse_elastic.learned import ElasticHistory
from verl_fuse_elastic.ledger import Ledger
from verl_fuse_elastic.scaler import Scaler

REPLICAS = tuple(ReplicaView(rank, 0, 64, routed=True, capacity=Capacity(64)) for rank in range(3))
KNOWN = ElasticHistory(decode=DecodeCost(0.1, 0.01))
PROMPTS = [Prompt(f"u{n}", f"k{n}", "math", 2, Prediction(50.0, 50.0)) for n in range(4)]
SPENT = Ledger(9.0, 3, 20.0, 7.0, 0.0)


def scaler(**block) -> Scaler:
    return Scaler(replace(ElasticConfig(scale=True, cost_weight=0.0, hysteresis=0.0), **block), 3, 200.0)


def test_before_decoding_was_measured_and_without_predictions_all_there_are_generate():
    unknown = [replace(prompt, prediction=None) for prompt in PROMPTS]
    for learned, prompts in ((ElasticHistory(), PROMPTS), (KNOWN, unknown), (KNOWN, [])):
        one = scaler()
        assert one.decide(prompts, REPLICAS, 3, learned) == 3
        assert one.metrics(1, SPENT, 3, 2) == {}
        assert scaler(max_replicas=2).decide(prompts, REPLICAS, 3, learned) == 2


def test_the_least_replicas_wanted_are_no_more_than_there_are():
    for learned in (ElasticHistory(), KNOWN):
        assert scaler(min_replicas=3).decide(PROMPTS, REPLICAS[:2], 2, learned) == 2


def test_a_replica_that_is_released_is_paid_for_its_own_prompts_alone():
    """One long prompt beside three short ones: the replica of the short ones costs little if it is given back."""
    uneven = [replace(p, prediction=Prediction(n, n)) for p, n in zip(PROMPTS, (200.0, 10.0, 10.0, 10.0), strict=True)]
    assert scaler(cost_weight=0.3).decide(uneven, REPLICAS, 3, KNOWN) == 1
    assert scaler(cost_weight=0.3, release=True).decide(uneven, REPLICAS, 3, KNOWN) == 2


def test_replicas_that_were_created_do_not_come_for_nothing_once_they_are_gone():
    """A standalone replica that is there does not make one more resident: without it, it has to be created again."""
    there = (*REPLICAS[:1], replace(REPLICAS[1], standalone=True))
    learned = replace(KNOWN, launch_seconds=1e6)
    one = Scaler(ElasticConfig(scale=True, cost_weight=0.3, hysteresis=0.0, standalone=1), 1, 200.0)
    assert one.decide(PROMPTS, there, 2, learned) == 1


def test_a_step_that_asks_for_more_is_foretold_anew_and_the_next_one_is_not():
    one = scaler(cost_weight=1.0)
    assert one.decide(PROMPTS, REPLICAS, 3, KNOWN) == 1
    first = one.metrics(1, SPENT, 3, 2)
    assert first["fuse/elastic_device_seconds"] == 2 * 27.0
    one.extend([*PROMPTS, replace(PROMPTS[0], uid="new"), replace(PROMPTS[0], uid="unknown", prediction=None)])
    second = one.metrics(1, SPENT, 3, 2)
    assert second["fuse/elastic_predicted_seconds"] > first["fuse/elastic_predicted_seconds"]
    one.begin_step()
    one.extend(PROMPTS)
    assert one.metrics(2, SPENT, 3, 2) == {}


def test_replica_seconds_beyond_those_foretold_are_those_of_samples_in_the_next_step():
    one = scaler(cost_weight=1.0, start_seconds=50.0)
    assert one.decide(PROMPTS, REPLICAS, 3, KNOWN) == 1
    first = one.metrics(1, SPENT, 3, 2)["fuse/elastic_predicted_seconds"]
    # One replica of those that generated before: it holds its devices for as long as it generates.
    one.metrics(1, replace(SPENT, seconds=first + 4.0, busy=first + 4.0, idle=0.0), 3, 2)
    one.generated(PROMPTS)
    learned = replace(KNOWN, corrections=Corrections())
    one.end_step(learned.corrections)
    one.begin_step()
    assert one.decide(PROMPTS, REPLICAS, 3, learned) == 1
    assert one.metrics(2, SPENT, 3, 2)["fuse/elastic_predicted_seconds"] == pytest.approx(first + 4.0)


def test_a_wrong_length_is_no_fault_of_the_number_of_replicas():
    """Responses twice as long as predicted take the time that such responses take."""
    one = scaler(cost_weight=1.0)
    longer = [replace(prompt, prediction=Prediction(100.0, 100.0)) for prompt in PROMPTS]
    assert one.decide(PROMPTS, REPLICAS, 3, KNOWN) == 1
    first = one.metrics(1, SPENT, 3, 2)["fuse/elastic_predicted_seconds"]
    one.metrics(1, replace(SPENT, seconds=2 * first, busy=2 * first, idle=0.0), 3, 2)
    one.generated(longer)
    learned = replace(KNOWN, corrections=Corrections())
    one.end_step(learned.corrections)
    one.begin_step()
    assert one.decide(PROMPTS, REPLICAS, 3, learned) == 1
    assert one.metrics(2, SPENT, 3, 2)["fuse/elastic_predicted_seconds"] == pytest.approx(first)


def test_a_number_of_replicas_that_is_slower_than_foretold_is_left():
    """Replicas that share a host: two of them are no faster than one, whatever each one's decoding costs."""

    def taken(count: int) -> Ledger:
        return Ledger(14.0, count, 14.0 * count, 0.0, 0.0)

    one = scaler(max_replicas=2, cost_weight=0.3)
    counts, learned = [], replace(KNOWN, corrections=Corrections())
    for step in range(12):
        one.begin_step()
        counts.append(one.decide(PROMPTS, REPLICAS, 3, learned))
        foretold = one.metrics(step, taken(counts[-1]), 3, 1)["fuse/elastic_predicted_seconds"]
        one.generated(PROMPTS)
        one.end_step(learned.corrections)
    assert counts[0] == 2
    assert counts[-1] == 1
    assert foretold == pytest.approx(14.0, rel=0.05)
