"""Batches and memory sums."""

import numpy as np
import pytest

from verl_fuse.cost.model import Batch, Memory


def test_parts_of_a_batch_sum_to_the_whole():
    batch = Batch.of(np.array([3, 4, 5]))
    assert batch == Batch(3, 12, 50)
    part = batch.split(4)
    assert (4 * part.sequences, 4 * part.tokens, 4 * part.squares) == (3, 12, 50)
    assert Batch.equal(3, 4) == Batch.of(np.array([4, 4, 4]))


def test_padding_is_to_the_longest_of_a_micro_batch():
    assert Batch.padded(np.array([1, 4, 2, 2, 7]), 2) == Batch.of(np.array([4, 4, 2, 2, 7]))


@pytest.mark.parametrize("offloaded", [False, True])
def test_memory_sums(offloaded: bool):
    memory = Memory(1, 2, 4, 8, 16, 32, offloaded)
    assert memory.total == memory.static + memory.active == 63
    assert memory.static == (0 if offloaded else 7)
