from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import COUNTS_ALWAYS, bounded, idle_while, key_of, read_block, without_effect


@dataclass(frozen=True)
class Inner:
    size: int = 4


@dataclass(frozen=True)
class Block:
    enabled: bool = False
    layout: Literal["shared", "slices"] = "shared"
    fraction: float = field(default=1.0, metadata=bounded(0.0, 1.0))
    count: int = field(default=8, metadata=bounded(minimum=1))
    names: tuple[str, ...] = ()
    folder: str | None = None
    inner: Inner = Inner()
    other: Inner | None = None
    limit: float | None = None
    pair: tuple[int, str] = (0, "")
    weights: dict[str, float] = field(default_factory=dict)
    told: str | None = field(default=None, metadata=COUNTS_ALWAYS)


@dataclass(frozen=True)
class Device:
    name: str
    memory: float
    price: float = 0.0
    links: list[int] = field(default_factory=list)


def test_an_override_names_its_key_however_it_changes_it():
    for override in ("a.b=1", "+a.b=1", "++a.b=x=y", "~a.b", "~a.b=1"):
        assert key_of(override) == "a.b"


@pytest.mark.parametrize("data", [None, {}, {"price": 1.0}])
def test_keys_without_a_default_are_needed(data):
    with pytest.raises(FuseError, match=r"^fuse\.device: missing name, memory$"):
        read_block(Device, data, "fuse.device")


def test_absent_block_is_the_defaults():
    assert read_block(Block, None, "fuse.x") == Block()


def test_values_are_taken_as_they_are():
    data = {"enabled": True, "fraction": 0, "names": ["a", "b"], "folder": "out", "inner": {"size": 2}}
    assert read_block(Block, data, "fuse.x") == Block(
        enabled=True, fraction=0.0, names=("a", "b"), folder="out", inner=Inner(2)
    )


def test_optional_blocks_numbers_pairs_and_mappings():
    data = {"other": {"size": 9}, "limit": 3, "pair": [1, "a"], "weights": {"a": 1.0}}
    block = read_block(Block, data, "fuse.x")
    assert block == Block(other=Inner(9), limit=3.0, pair=(1, "a"), weights={"a": 1.0})
    assert read_block(Block, {"other": None, "limit": None}, "fuse.x") == Block()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"enabeld": True}, "fuse.x.enabeld: unknown key (did you mean 'enabled'?); allowed: enabled, layout"),
        ({"enabled": "yes"}, "fuse.x.enabled='yes': needs true or false"),
        ({"enabled": 1}, "fuse.x.enabled=1: needs true or false"),
        ({"layout": "slice"}, "fuse.x.layout='slice': needs one of 'shared', 'slices'"),
        ({"fraction": 1.5}, "fuse.x.fraction=1.5: needs >= 0.0 and <= 1.0"),
        ({"fraction": float("nan")}, "fuse.x.fraction=nan: needs >= 0.0 and <= 1.0"),
        ({"fraction": "half"}, "fuse.x.fraction='half': needs a number"),
        ({"count": 0}, "fuse.x.count=0: needs >= 1"),
        ({"count": 2.5}, "fuse.x.count=2.5: needs a whole number"),
        ({"count": True}, "fuse.x.count=true: needs a whole number"),
        ({"names": "a"}, "fuse.x.names='a': needs a list of str"),
        ({"names": [1]}, "fuse.x.names=[1]: needs a list of str"),
        ({"folder": 3}, "fuse.x.folder=3: needs a string or null"),
        ({"a line\nof a script " * 9: None}, "a line of a script a li...: unknown key; allowed: enabled"),
        ({"inner": {"siez": 1}}, "fuse.x.inner.siez: unknown key (did you mean 'size'?)"),
        ({"other": 3}, "fuse.x.other=3: needs"),
        ({"limit": "x"}, "fuse.x.limit='x': needs a number or null"),
        ({"pair": [1]}, "fuse.x.pair=[1]: needs a list of 2: a whole number, a string"),
        ({"weights": [1]}, "fuse.x.weights=[1]: needs"),
        ({"inner": 3}, "fuse.x.inner=3: needs a block with keys size"),
        ("on", "fuse.x='on': needs a block"),
    ],
)
def test_bad_values_name_key_value_and_what_is_allowed(data, message):
    with pytest.raises(FuseError) as error:
        read_block(Block, data, "fuse.x")
    assert message in str(error.value)


def test_what_is_set_in_a_block_that_is_off_is_found():
    assert without_effect(Block()) == {}
    off = Block(layout="slices", weights={"a": 1.0}, told="counts all the same")
    assert without_effect(off) == {(("enabled", False),): {"layout": "slices", "weights": {"a": 1.0}}}
    assert without_effect(replace(off, enabled=True)) == {}
    assert without_effect(Inner(5)) == {}, "it has nothing that switches it off"


def test_what_another_key_makes_idle_is_found():
    @dataclass(frozen=True)
    class Switched:
        enabled: bool = False
        scale: bool = False
        weight: float = field(default=0.5, metadata=bounded(0.0, 1.0) | idle_while(scale=False))

    assert without_effect(Switched(True, weight=0.7)) == {(("scale", False),): {"weight": 0.7}}
    assert without_effect(Switched(True, True, weight=0.7)) == {}
    assert without_effect(Switched(weight=0.7)) == {(("enabled", False),): {"weight": 0.7}}


def test_all_problems_of_a_block_are_found_at_once():
    with pytest.raises(FuseError) as error:
        read_block(Device, {"memory": "much", "cores": -1, "nam": "x"}, "device")
    assert len(error.value.args) == 4, str(error.value)


@dataclass(frozen=True)
class Lists:
    inners: tuple[Inner, ...] = ()
    rows: tuple[tuple[float, ...], ...] = ()
    pairs: tuple[tuple[str, float], ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)


def test_values_of_any_type_are_read_as_they_are():
    @dataclass(frozen=True)
    class Passed:
        parameters: Mapping[str, Any] | None = None

    given = {"tag": "x", "inner": {"number": 1, "list": [None]}}
    assert read_block(Passed, {"parameters": given}, "x") == Passed(given)
    with pytest.raises(FuseError, match=r"x\.parameters='tag': needs names, each with any value or null"):
        read_block(Passed, {"parameters": "tag"}, "x")


def test_items_of_lists_are_read_and_named_by_their_places():
    data = {"inners": [{"size": 2}], "rows": [[1, 2.5]], "pairs": [["a", 1]], "shares": {"x": 1}}
    assert read_block(Lists, data, "x") == Lists((Inner(2),), ((1, 2.5),), (("a", 1),), {"x": 1})
    faulty = {"inners": [{}, {"size": "2"}, {"siz": 3}], "rows": [[1], [True]], "pairs": {}, "shares": {"x": "1"}}
    with pytest.raises(FuseError) as error:
        read_block(Lists, faulty, "x")
    assert [message.partition(": ")[0] for message in error.value.args] == [
        "x.inners[1].size='2'",
        "x.inners[2].siz",
        "x.rows[1]=[True]",
        "x.pairs={}",
        "x.shares={'x'",
    ]
