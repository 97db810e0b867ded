"""The configuration reference agrees with the dataclasses and default.yaml."""

import dataclasses

from ci.docs.configuration import FITS, PAGE, README, blocks, comments, reference, with_fits
from verl_fuse.host.start.settings import CoreBlock


def test_the_reference_is_current():
    assert PAGE.read_text() == reference(), "run `python -m ci.docs configuration`"


def test_the_table_of_features_is_current():
    assert README.read_text() == with_fits(README.read_text()), "run `python -m ci.docs configuration`"
    assert "| [speculation](plugins/verl_fuse_speculation/README.md) |" in with_fits(f"before\n{FITS}| old |\n\nafter")
    assert with_fits(f"before\n{FITS}| old |\n\nafter").endswith("|\n\nafter")


def test_a_key_that_presets_set_says_which():
    text = PAGE.read_text()
    assert "| `metrics` | `null` | `stock` or `computed`, `null`: `computed` by `fast`, else `stock` |" in text
    assert "| `skip_values` | `null` | `true` or `false`, `null`: `true` by `safe` and `fast`, else `false` |" in text
    assert "| `weight_sync` | `null` | `stock` or `shards`, `null`: `stock` |" in text


def test_every_key_is_in_it():
    text = PAGE.read_text()
    for block in (CoreBlock, *blocks().values()):
        for field in dataclasses.fields(block):
            assert f"\n| `{field.name}` |" in text


def test_comments_belong_to_the_key_below_them():
    text = "fuse:\n  # About a.\n  # More.\n  a: 1\n\n  # Of b.\n  b:\n    # Of c.\n    c: 2\n"
    assert comments(text) == {"fuse": "", "fuse.a": "About a. More.", "fuse.b": "Of b.", "fuse.b.c": "Of c."}
