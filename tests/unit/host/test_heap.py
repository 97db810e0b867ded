import gc
import weakref

import pytest

from verl_fuse.host.start.heap import keep_heap


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


class Knot:
    """An object that refers to itself, which only the collector can free."""

    def __init__(self):
        self.own = self


def test_objects_that_exist_are_looked_at_no_more_and_later_ones_are():
    kept = Knot()
    seen = weakref.ref(kept)
    keep_heap()
    del kept
    later = weakref.ref(Knot())
    gc.collect()
    assert seen() is not None
    assert later() is None


def test_garbage_is_not_kept():
    garbage = weakref.ref(Knot())
    keep_heap()
    assert garbage() is None
