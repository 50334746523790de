"""The table of calls of the launcher in C, by itself: what it remembers, where it launches, what it refuses."""

import ctypes
import struct

import pytest
import torch
from native_driver import COMPILER, CONTEXT, NativeFakeDriver, recording_cuda

from dsagen.runtime import native

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def test_kernels_of_several_devices_run_in_their_contexts():
    """A `Calls` table holds calls of all devices; each is launched in its own context, and none is left behind."""
    driver = NativeFakeDriver()
    driver.block_bytes["kernel"] = 8
    function, _ = driver.handles(0, "kernel")
    calls = driver.launcher().calls(1, 1, 0, 9, print)
    row = ((function, 1, 32, 0, False, 1, bytes(8), ((0, 0, 0),)),)
    tensor = ints(4)
    for device in (0, 1):
        assert calls.remember((tensor, device), CONTEXT + device, row, (), tuple)
    for device in (1, 0, 1, 1):
        assert calls.repeat(tensor, device)
    contexts = [record.context for record in driver.cuda.drain()]
    assert contexts == [CONTEXT + 1, CONTEXT, CONTEXT + 1, CONTEXT + 1]
    assert driver.cuda.get("stub_pushes") == 4
    assert ctypes.c_void_p.in_dll(driver.cuda.library, "stub_context").value is None


def test_a_table_that_is_full_begins_anew():
    launcher = recording_cuda().launcher
    calls = launcher.calls(1, 1, 0, 3, print)
    tensor, launch = ints(1), (1 << 40, 1, 32, 0, False, 1, bytes(8), ((0, 0, 0),))
    for number in range(5):
        assert calls.remember((tensor, number), 1, (launch,), (), tuple) is True
        assert len(calls) == (number % 3) + 1
    assert calls.remember((tensor, 4), 1, (launch,), (), tuple) is True and len(calls) == 2
    calls.forget()
    assert len(calls) == 0 and calls.repeat(tensor, 4) is False


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ((), "0 launches, expected 1 to 4"),
        (((1, 1, 32, 0, False, 1, bytes(2000), ()),), "an argument block of 2000 B"),
        (((1, 1, 32, 0, False, 1, bytes(8), ((1, 0, 0),)),), "address of tensor 0 at byte 1"),
        (((1, 1, 32, 0, False, 1, bytes(8), ((0, 1, 0),)),), "address of tensor 1 at byte 0"),
        (((1, 1, 32, 0, False, 1, bytes(8), ((-1, 0, 0),)),), "address of tensor 0 at byte -1"),
    ],
)
def test_launches_that_do_not_fit_are_refused(launches, message):
    calls = recording_cuda().launcher.calls(1, 0, 0, 3, print)
    with pytest.raises(ValueError, match=message):
        calls.remember((ints(1),), 1, launches, (), tuple)
    assert len(calls) == 0


def test_an_address_may_lie_inside_of_a_tensor():
    driver = NativeFakeDriver()
    driver.block_bytes["kernel"] = 16
    function, context = driver.handles(0, "kernel")
    calls = driver.launcher().calls(2, 0, 0, 3, print)
    first = ints(8), ints(8)
    row = (function, 1, 32, 0, False, 1, bytes(16), ((0, 0, 0), (8, 1, 20)))
    assert calls.remember(first, context, (row,), (), tuple)
    second = ints(8), ints(8)
    assert calls.repeat(*second)
    (record,) = driver.launches
    assert struct.unpack("<QQ", record.block) == (second[0].data_ptr(), second[1].data_ptr() + 20)


def test_clusters_reach_the_driver():
    driver = NativeFakeDriver()
    driver.block_bytes["kernel"] = 8
    function, context = driver.handles(0, "kernel")
    calls = driver.launcher().calls(1, 0, 0, 3, print)
    assert calls.launch(5, context, ((function, 6, 32, 100, True, 2, bytes(range(8)), ()),), ()) is True
    (record,) = driver.launches
    config = record.config
    assert (config.grid, config.threads, config.smem_bytes, config.stream) == (6, 32, 100, 5)
    assert (config.overlaps_previous, config.cluster) == (True, 2)
    assert record.block == bytes(range(8))


@pytest.mark.parametrize(
    ("parameters", "returned", "message"),
    [((("a", 2),), 0, "parameter 0 at place 2 of 1"), ((("a", -3),), 0, "place -3"), ((), 4, "4 results")],
)
def test_entrances_that_do_not_fit_are_refused(parameters, returned, message):
    with pytest.raises(ValueError, match=message):
        native.load_module().Entrance({}, print, parameters, (None,), returned)
