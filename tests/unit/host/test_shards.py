"""How parameters are pickled on their way through Ray's object store: as bytes beside the message, which are not copied
on their way out; and what a slice makes of the parts that ranks left. No Ray, no ranks."""

import pickle
import warnings

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch

    from verl_fuse.errors import FuseError
    from verl_fuse.host.weights.buckets import take_over
    from verl_fuse.host.weights.shard import Shard

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def sent(shards):
    """Return (bytes of the message itself, buffers beside it, the object taken out of it where the buffers are
    read-only)."""
    beside = []
    message = pickle.dumps(shards, protocol=5, buffer_callback=beside.append)
    store = [bytes(buffer.raw()) for buffer in beside]
    return message, beside, pickle.loads(message, buffers=store), store


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0, 4)])
def test_a_shard_is_the_same_on_the_other_side(dtype, shape):
    data = torch.arange(15).reshape(3, 5).to(dtype) if shape == (3, 5) else torch.ones(shape).to(dtype)
    _, _, (found,), _ = sent([Shard("weight", (2, 0), data)])
    assert (found.name, found.offset, found.data.dtype, found.data.shape) == ("weight", (2, 0), dtype, data.shape)
    assert torch.equal(found.data, data)


def test_bytes_are_beside_the_message_and_copied_on_neither_side():
    shards = [Shard(f"p{number}", (0, 0), torch.randn(256, 512).to(torch.bfloat16)) for number in range(4)]
    message, beside, found, store = sent(shards)
    assert len(message) < 2000
    where = [memoryview(buffer.raw()) for buffer in beside]
    assert [view.nbytes for view in where] == [shard.data.nbytes for shard in shards]
    # On the way in a buffer is the tensor itself.
    assert [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in where] == [
        s.data.data_ptr() for s in shards
    ]
    # On the way out a tensor is the store's memory, which may not be written.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = [torch.frombuffer(stored, dtype=torch.uint8).data_ptr() for stored in store]
    assert [shard.data.data_ptr() for shard in found] == there


def test_a_slice_takes_over_what_it_may_only_read():
    data = torch.arange(6.0).reshape(2, 3)
    _, _, found, _ = sent([Shard("weight", (0, 0), data)])
    state = {"weight": torch.zeros(2, 3, dtype=torch.bfloat16)}
    take_over(state, found)
    assert torch.equal(state["weight"], data.to(torch.bfloat16))
    state["weight"].fill_(9)
    assert torch.equal(found[0].data, data)


def part(*rows):
    """The part of a weight of three rows and two columns that has these rows."""
    return Shard("weight", (rows[0], 0), torch.arange(6.0).reshape(3, 2)[list(rows)])


def test_what_a_slice_holds_is_put_together_from_parts():
    state = {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}
    take_over(state, [part(2), Shard("bias", (0,), torch.ones(2)), part(0, 1)])
    assert state["weight"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert state["bias"].tolist() == [1, 1]


@pytest.mark.parametrize(("left", "elements"), [([], 6), ([part(0)], 4), ([part(1, 2)], 2)])
def test_a_parameter_that_was_not_left_as_a_whole_is_named(left, elements):
    state = {"bias": torch.zeros(2), "weight": torch.zeros(3, 2)}
    with pytest.raises(FuseError, match=rf"1 parameters were not .*, first 'weight' \({elements} elements\)"):
        take_over(state, [Shard("bias", (0,), torch.ones(2)), *left])


def test_a_parameter_that_a_slice_does_not_have_is_named():
    with pytest.raises(FuseError, match="it has no parameter 'bias', which was exported"):
        take_over({"weight": torch.zeros(3, 2)}, [part(0, 1, 2), Shard("bias", (0,), torch.ones(2))])
