"""Blocks of shared memory are reused once their readers are done."""

import gc
import weakref

import numpy as np
import pytest

from embodied.rpc import Disconnected, buffers, calls

pytestmark = pytest.mark.skipif(not buffers.AVAILABLE, reason="there is no memfd here")


def test_a_block_with_readers_outlives_the_garbage_collector():
    arena = buffers.Arena()
    block = arena.allocate(8192)
    place = block.number
    array = np.frombuffer(block.leased(), np.uint8)
    del block
    gc.collect()
    other = arena.allocate(8192)
    assert other.number != place
    array[:] = 7  # The memory is still mapped.
    del array
    gc.collect()
    assert arena.allocate(8192).number == place


def test_blocks_of_an_abandoned_call_are_closed_at_once():
    gc.collect()
    gc.disable()
    try:
        arena = buffers.Arena()
        call = calls.Future("act", "here", None)
        call.request, call.reply = arena.allocate(8192), arena.allocate(8192)
        blocks = [weakref.ref(call.request), weakref.ref(call.reply)]
        call.abandon(Disconnected("gone"))
        with pytest.raises(Disconnected) as raised:
            call.result()
        # The error knows the frame of `result`, and that the call.
        assert raised.value.__traceback__ is not None
        assert [block() for block in blocks] == [None, None]
    finally:
        gc.enable()


@pytest.mark.slow
def test_blocks_that_are_free_are_used_again():
    arena = buffers.Arena()
    places = set()
    for _ in range(10):
        block = arena.allocate(8192)
        places.add(block.number)
        view = np.frombuffer(block.leased(), np.uint8)[:10]
        del block, view
        gc.collect()
    assert len(places) == 1
