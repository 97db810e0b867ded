"""Keys of the block that gain nothing in a run, and the notes about them: see the invariants of
verl_fuse_interstage/gains.py."""

import pytest

from verl_fuse_interstage.config import InterstageConfig
from verl_fuse_interstage.gains import in_force

ALL = ("old_log_prob", "ref", "values")


@pytest.mark.parametrize(
    "block",
    [
        InterstageConfig(enabled=True),
        InterstageConfig(enabled=True, layout="slices"),
        InterstageConfig(enabled=True, layout="slices", migration_threshold=0.2),
        InterstageConfig(enabled=True, layout="slices", migration_threshold="auto"),
        # 0 never migrates.
        InterstageConfig(enabled=True, migration_threshold=0),
    ],
)
def test_a_block_that_can_gain_something_is_in_force_as_it_is(block):
    assert in_force(block, ALL) == (block, None)
    assert in_force(block, ("values",)) == (block, None)


@pytest.mark.parametrize("layout", ["shared", "slices"])
@pytest.mark.parametrize("threshold", [None, 4, 0.2])
def test_without_inference_that_can_be_streamed_nothing_is_done(layout, threshold):
    block, said = in_force(InterstageConfig(enabled=True, layout=layout, migration_threshold=threshold), ())
    assert not block.enabled
    assert said is not None
    assert said.startswith("fuse.interstage.enabled=true: nothing can be streamed")


def test_without_slices_samples_are_streamed_but_nothing_migrates():
    asked = InterstageConfig(enabled=True, migration_threshold=0.2, micro_group=3)
    block, said = in_force(asked, ALL)
    assert block == InterstageConfig(enabled=True, micro_group=3)
    assert said is not None
    assert said.startswith(
        "fuse.interstage.migration_threshold=0.2: nothing migrates while fuse.interstage.layout=shared"
    )


def test_with_streamed_updates_the_tail_migrates_though_nothing_is_inferred():
    asked = InterstageConfig(enabled=True, layout="slices", migration_threshold="auto")
    assert in_force(asked, (), streams=True) == (asked, None)
    for block in (InterstageConfig(enabled=True, layout="slices"), InterstageConfig(enabled=True)):
        assert not in_force(block, (), streams=True)[0].enabled
