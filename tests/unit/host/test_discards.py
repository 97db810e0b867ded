"""The invariants in the docstring of the module, with the lists that verl's replay buffer keeps."""

import logging
from collections import defaultdict
from types import SimpleNamespace

import pytest

pytest.importorskip("transfer_queue")
discards = pytest.importorskip("verl_fuse.host.rollout.discards")


class Buffer:
    """The lists of a replay buffer whose batch has three groups."""

    def __init__(self):
        self.filter_groups_metric, self.train_batch_size = "acc", 3
        self._dapo_classification_cache, self.failure_keys = defaultdict(dict), defaultdict(set)

    def classify(self, **values):
        self._dapo_classification_cache["train"] |= values
        return set(values)


@pytest.fixture
def now(monkeypatch):
    clock = SimpleNamespace(at=100.0)
    monkeypatch.setattr(discards, "time", SimpleNamespace(monotonic=lambda: clock.at))
    return clock


@pytest.fixture
def buffer():
    return Buffer()


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_step_that_discards_says_so_every_thirty_seconds(buffer, now, capsys):
    told = discards.Discards(buffer)
    now.at = 200.0
    told.tell(2)
    assert capsys.readouterr().out == "", "nothing was discarded"
    now.at = 129.9
    told.note(buffer.classify(a=0.0, b=1.0, c=0.0))
    told.tell(2)
    assert capsys.readouterr().out == ""
    now.at = 130.0
    told.tell(2)
    told.tell(2)
    assert capsys.readouterr().out == (
        "verl-fuse: 5 groups generated in this step: 3 discarded (2 with acc 0 throughout, 1 with acc 1 throughout), "
        "2 kept\n"
    )
    now.at = 160.0
    told.tell(3)
    assert "3 discarded" in capsys.readouterr().out
    told.begin_step()
    now.at = 500.0
    told.tell(0)
    assert capsys.readouterr().out == "", "another step"


def test_four_batches_in_vain_cost_one_warning_a_step_which_says_why(buffer, now, caplog):
    told = discards.Discards(buffer)
    for group in range(11):
        told.note(buffer.classify(**{f"u{group}": 0.25 if group < 9 else 1.0}))
        told.tell(0)
    assert warned(caplog) == []
    for group in range(11, 40):
        told.note(buffer.classify(**{f"u{group}": 1.0}))
        told.tell(0)
    (line,) = warned(caplog)
    assert line.startswith(
        "12 groups were discarded and none was kept meanwhile (9 with acc 0.25 throughout, 3 with acc 1 throughout). "
        "A group whose samples are all rewarded alike has no gradient"
    )
    assert "actor_rollout_ref.rollout.n" in line
    told.begin_step()
    told.note({f"u{group}" for group in range(12)})
    told.tell(0)
    assert len(warned(caplog)) == 2, "another step"


def test_a_group_that_is_kept_begins_the_count_anew(buffer, now, caplog):
    told = discards.Discards(buffer)
    told.note(buffer.classify(**{f"u{group}": 0.0 for group in range(11)}))
    told.tell(0)
    told.note(buffer.classify(last=0.0))
    told.tell(1)
    told.note(buffer.classify(**{f"v{group}": 0.0 for group in range(11)}))
    told.tell(1)
    assert warned(caplog) == []
    told.note(buffer.classify(w=0.0))
    told.tell(1)
    (line,) = warned(caplog)
    assert line.startswith("12 groups were discarded and none was kept meanwhile (24 with acc 0 throughout). ")


def test_groups_that_fail_and_are_replaced_for_ever_are_told_as_such(buffer, now, caplog):
    told = discards.Discards(buffer)
    buffer.failure_keys["train"] = {f"u{group}" for group in range(11)}
    told.note({f"u{group}" for group in range(12)})
    told.tell(0)
    (line,) = warned(caplog)
    assert "(11 failed, 1 for the sampler's own reason). Groups that failed are replaced" in line
    assert "sync_refill_failed_groups" in line


def test_a_line_names_the_three_most_frequent_reasons(buffer, now, capsys):
    told = discards.Discards(buffer)
    told.note(buffer.classify(a=4.0, b=3.0, c=3.0, d=2.0, e=2.0, f=2.0, g=1.0, h=1.0, i=1.0, j=1.0))
    now.at = 130.0
    told.tell(0)
    assert capsys.readouterr().out == (
        "verl-fuse: 10 groups generated in this step: 10 discarded "
        "(4 with acc 1 throughout, 3 with acc 2 throughout, 2 with acc 3 throughout, …), 0 kept\n"
    )
