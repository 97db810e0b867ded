"""Exempts the objects of set-up from the rounds of the driver's garbage collector.

A driver has about a million objects once verl, Ray and torch are loaded. All of them stay until the run ends, and a
full round of the collector looks at each of them, for a tenth of a second or more, in the middle of steps.

Invariant (tests/unit/host/test_heap.py): objects that exist are looked at no more; later objects are.
"""

import gc


def keep_heap() -> None:
    """Keep all objects that exist now until the process ends, and collect later objects only."""
    gc.collect()
    gc.freeze()
