import pytest

from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse_elastic.ledger import cost_metrics, ledger, starting


def request(rank, start, end):
    return Span("request", f"replica {rank}", "generate", start, end, {})


def stop(rank, start, end):
    return Span("migrate", f"replica {rank}", "other", start, end, {})


def step(*spans):
    return Timeline("run", 1, 0.0, 20.0, (Span("gen", "step", "stage", 2.0, 12.0), *spans))


def test_busy_idle_and_parked_add_up():
    found = ledger(step(request(0, 2.0, 12.0), request(0, 3.0, 9.0), request(1, 3.0, 7.0), stop(1, 7.5, 8.0)), 2)
    assert (found.seconds, found.used, found.busy, found.parked) == (10.0, 2, 14.0, 4.0)
    assert found.idle == pytest.approx(20 - 18)
    assert found.held == pytest.approx(16)


def test_a_replica_that_never_ran_is_parked_from_when_it_stopped():
    found = ledger(step(request(0, 2.0, 12.0), stop(1, 1.0, 2.5), stop(2, 1.0, 1.5)), 4)
    assert (found.used, found.busy, found.parked) == (1, 10.0, 9.5 + 10.0)
    assert found.idle == pytest.approx(40 - 29.5)


def test_a_replica_that_stopped_once_all_was_generated_was_not_parked():
    found = ledger(step(request(0, 2.0, 12.0), request(1, 3.0, 7.0), stop(1, 11.5, 13.0)), 2)
    assert (found.busy, found.idle, found.parked) == (14.0, 6.0, 0.0)


def test_what_a_replica_gave_back_is_not_paid_for_and_what_its_creation_took_is():
    timeline = step(request(0, 2.0, 12.0), request(1, 3.0, 7.0), stop(1, 7.5, 8.0))
    start = Span("start", "replica 1", "other", 0.0, 1.5, {})
    for found, paid in ((timeline, 2 * 20 - 4), (step(*timeline.spans, start), 2 * 20 - 4 + 1.5)):
        spent = ledger(found, 2)
        assert spent.parked == 4.0
        assert cost_metrics(found, spent, 2, 3, 1.0, 100)["fuse/cost_per_million_tokens"] == 1e4 * 3 * paid


def test_validation_after_generation_is_not_counted():
    assert ledger(step(request(0, 4.0, 12.0), request(0, 13.0, 19.0), request(1, 14.0, 15.0)), 2).busy == 8.0


def test_a_step_that_generated_nothing_has_no_ledger():
    assert ledger(Timeline("run", 1, 0.0, 5.0, (request(0, 1.0, 2.0),)), 2) is None


def test_a_replica_is_paid_for_from_its_devices_on():
    start = Span("start", "replica 3", "other", 1.0, 8.5, {})
    other = Span("start", "step", "stage", 0.0, 1.0)
    assert starting(step(request(0, 2.0, 12.0), start, other)) == [7.5]
    assert starting(step()) == []


def test_where_no_token_was_trained_there_is_no_cost_per_token():
    timeline = step(request(0, 2.0, 12.0))
    spent = ledger(timeline, 1)
    assert "fuse/cost_per_million_tokens" not in cost_metrics(timeline, spent, 1, 2, 0.5, 0)
    assert cost_metrics(timeline, spent, 1, 2, 0.5, 100)["fuse/cost_per_million_tokens"] == 1e6 * 0.5 * 2 * 20.0 / 100
