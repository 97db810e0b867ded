"""What is run in which order, and what is run again; recorded runs stand for verl here."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from records_of_runs import changed, load, slower

from ci.upstream.ab.command import compare_recipe, parse
from ci.upstream.ab.record import Record
from ci.upstream.arguments import FAILED
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.judge import Level


class Recorded:
    """In place of a Bench: answers each run with a record, and notes what was asked."""

    def __init__(self, **records: Record):
        self.recipe = SimpleNamespace(name="ppo-cpu")
        self.records = {"recording": load("stock"), "stock": load("stock"), "off": load("observe"), **records}
        self.asked: list[tuple] = []

    def run(self, name: str, extra: tuple[str, ...] = (), *, stock: bool, installed: bool, steps: int) -> Record:
        self.asked.append((name, extra, stock, installed, steps))
        return self.records[name]


def test_stock_records_then_replays_and_each_arm_follows():
    bench = Recorded(streaming=load("streaming"))
    off, streaming = compare_recipe(bench, ["off", "streaming"])
    assert bench.asked == [
        ("recording", (), True, False, 6),
        ("stock", (), True, False, 10),
        ("off", (), True, True, 10),
        ("streaming", ("fuse.interstage.enabled=true",), False, True, 10),
    ]
    assert (off.arm, off.verdict, off.first) == ("off", Level.GREEN, ())
    # The cut record has none of verl-fuse's own metrics.
    assert [f.what for f in streaming.findings if not f.passed] == ["replayed steps without fuse/streamed_samples"]


def test_what_is_only_slower_is_run_again_and_the_second_run_counts():
    slow = slower(load("observe"), 2.0)
    bench = Recorded(off=slow, **{"off-again": load("observe")})
    (off,) = compare_recipe(bench, ["off"])
    assert [name for name, *_ in bench.asked] == ["recording", "stock", "off", "off-again"]
    assert off.verdict is Level.GREEN
    assert [finding.kind for finding in off.first if not finding.passed] == ["time"]
    (off,) = compare_recipe(Recorded(off=slow, **{"off-again": slow}), ["off"])
    assert off.verdict is Level.YELLOW


def test_off_sets_the_pace_where_stock_was_disturbed():
    disturbed, slow = slower(load("stock"), 2.0), slower(load("observe"), 2.0)
    observe = {"observe": slow, "observe-again": slow}
    _, one = compare_recipe(Recorded(stock=disturbed, **observe), ["off", "observe"])
    assert "time" in [finding.kind for finding in one.findings if not finding.passed]


def test_wrong_numbers_are_not_run_again():
    bench = Recorded(off=changed(load("observe"), 2, metrics={"actor/pg_loss": 0.0}))
    (off,) = compare_recipe(bench, ["off"])
    assert off.verdict is Level.RED
    assert [name for name, *_ in bench.asked] == ["recording", "stock", "off"]


@pytest.mark.parametrize("name", ["recording", "stock"])
def test_without_stock_verl_there_is_nothing_to_compare_with(name: str):
    failed = replace(load("stock"), name=name, code=1, note="its last words")
    with pytest.raises(FuseError, match=r"ppo-cpu ended with exit code 1 on stock verl:\nits last words"):
        list(compare_recipe(Recorded(**{name: failed}), ["off"]))


def test_usage():
    options = parse(["--arm", "off", "--arm", "off", "--recipe", "grpo-cpu"])
    assert (options.arm, options.recipe) == (["off"], ["grpo-cpu"])
    assert (parse([]).arm, parse([]).recipe) == (["off", "observe", "streaming"], ["ppo-cpu"])


@pytest.mark.parametrize("arguments", [["--arm", "nosuch"], ["--verl", "0.9.1", "--path", "."], ["nosuch"]])
def test_bad_usage_is_not_a_finding(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == FAILED
    assert "usage: python -m ci.upstream ab" in capsys.readouterr().err
