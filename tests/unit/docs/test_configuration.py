"""The configuration reference agrees with the dataclasses and default.yaml."""

import dataclasses

from ci.docs.configuration import PAGE, blocks, comments, reference
from verl_fuse.host.start.settings import CoreBlock


def test_the_reference_is_current():
    assert PAGE.read_text() == reference(), "run `python -m ci.docs configuration`"


def test_every_key_is_in_it():
    text = PAGE.read_text()
    for block in (CoreBlock, *blocks().values()):
        for field in dataclasses.fields(block):
            assert f"\n| `{field.name}` |" in text


def test_comments_belong_to_the_key_below_them():
    text = "fuse:\n  # About a.\n  # More.\n  a: 1\n\n  # Of b.\n  b:\n    # Of c.\n    c: 2\n"
    assert comments(text) == {"fuse": "", "fuse.a": "About a. More.", "fuse.b": "Of b.", "fuse.b.c": "Of c."}
