"""The configuration reference agrees with the dataclasses and default.yaml."""

import re
import shlex
from typing import get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser

from ci.docs.configuration import (
    EXAMPLES,
    FITS,
    PAGE,
    README,
    blocks,
    comments,
    examples,
    listed,
    reference,
    switch,
    with_fits,
)
from verl_fuse.host.start.settings import CoreBlock
from verl_fuse.spec.block import read_block


def test_the_reference_is_current():
    assert PAGE.read_text() == reference(), "run `python -m ci.docs configuration`"


def test_the_table_of_features_is_current():
    assert README.read_text() == with_fits(README.read_text()), "run `python -m ci.docs configuration`"
    assert "| [speculation](plugins/verl_fuse_speculation/README.md) |" in with_fits(f"before\n{FITS}| old |\n\nafter")
    assert with_fits(f"before\n{FITS}| old |\n\nafter").endswith("|\n\nafter")


def test_a_key_that_presets_set_says_which():
    rows = {
        line.split("`")[1]: line.partition(") | ")[2] for line in PAGE.read_text().splitlines() if "](#fuse" in line
    }
    assert rows["metrics"] == "`null` | `stock` or `computed`, `null`: `computed` by `fast`, else `stock` |"
    assert rows["skip_values"] == "`null` | `true` or `false`, `null`: `true` by `safe` and `fast`, else `false` |"
    assert rows["weight_sync"] == "`null` | `stock` or `shards`, `null`: `stock` |"


SECTIONS = {"fuse": CoreBlock, **{f"fuse.{name}": block for name, block in blocks().items()}}
KEYS = {
    f"{name}.{key}": (block, key, hint)
    for name, block in SECTIONS.items()
    for key, hint in get_type_hints(block).items()
}


def test_every_key_has_a_row_an_anchor_and_a_text():
    text = PAGE.read_text()
    for key in KEYS:
        assert f"\n| [`{key.rpartition('.')[2]}`](#{key}) |" in text
        assert re.search(rf'\n### <a id="{re.escape(key)}"></a>`{re.escape(key)}`\n\n\S', text), key
    assert text.count("### ") == len(KEYS)


def test_every_key_that_is_no_switch_has_an_example_that_is_accepted():
    shown = examples(EXAMPLES.read_text())
    assert shown.keys() == {key for key, (_, _, hint) in KEYS.items() if not switch(hint)}
    for key, (value, meaning) in shown.items():
        block, field, _ = KEYS[key]
        assert getattr(read_block(block, {field: value}, key), field) != getattr(block(), field), key
        assert not meaning.endswith("."), key


def test_an_example_is_what_hydra_reads():
    overrides = re.findall("^Example: `(.+?)` ", PAGE.read_text(), re.MULTILINE)
    shown = examples(EXAMPLES.read_text())
    assert len(overrides) == len(shown)
    for override in overrides:
        (argument,) = shlex.split(override)
        parsed = OverridesParser.create().parse_override(argument)
        assert parsed.value() == shown[parsed.key_or_group][0]


def test_comments_belong_to_the_key_below_them():
    text = "fuse:\n  # About a.\n  # More.\n  a: 1\n\n  # Of b.\n  b:\n    # Of c.\n    c: 2\n"
    assert comments(text) == {"fuse": "", "fuse.a": "About a. More.", "fuse.b": "Of b.", "fuse.b.c": "Of c."}


def test_many_exclusions_are_listed_by_block():
    few = "Not with fuse.pipeline.enabled, critic.model.{lora.rank,mtp.enable}."
    assert listed(few) == few
    many = (
        "Not with {a.b,c}.m.{x,y.z}, c.{p,q}, fuse.pipeline.enabled, a key=1 or 2, parameters in float16. More is said."
    )
    assert listed(many).split("\n") == [
        *("Not with", ""),
        "- `fuse.pipeline.enabled`",
        "- `a.b.m.`: `x`, `y.z`",
        "- `c.m.`: `x`, `y.z`",
        "- `c.`: `p`, `q`",
        "- a key=1 or 2",
        "- parameters in float16",
        "",
        "More is said.",
    ]
