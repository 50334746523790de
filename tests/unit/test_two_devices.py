"""Kernels on two devices: whichever has the tensors decides context, module, stream and plan of a call.

Both are played on CPU tensors, which lie on the device that a test says.
"""

import ctypes
from dataclasses import replace
from functools import partial

import logits_calls as scored
import pytest
import torch
from fake_driver import GOOD, H200, FakeDriver, Record, fake_cubins
from native_driver import COMPILER, CONTEXT, NativeFakeDriver
from test_native_launcher import BATCH, CALLS, DECODE, INDEX, S_Q, TOPK, TOPK_SPEC, without_out

from dsagen.errors import DeviceError, FrozenError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.runtime.driver import LaunchConfig
from dsagen.spec import load_spec

OPS = torch.ops.dsagen
# Streams that the recording library takes for captured ones.
CAPTURED = 0x77


class TwoDevices(FakeDriver):
    """Launches by cuda-python. `here` is where tensors lie, `streams` are the devices' current ones."""

    def __init__(self, **fields):
        self.streams, self.second = [0x10, 0x20], H200
        super().__init__(**fields)
        self.here = 0

    @property
    def here(self) -> int:
        return self._here

    @here.setter
    def here(self, ordinal: int) -> None:
        self._here = ordinal

    def switch(self, ordinal: int, stream: int) -> None:
        self.streams[ordinal] = stream

    def device_count(self) -> int:
        return 2

    def facts(self, ordinal):
        return self.second if ordinal else self.device

    def ordinal(self, device):
        return self.here if device.type == "cpu" else None

    def current_stream(self, ordinal):
        return self.streams[ordinal]

    def is_capturing(self, ordinal):
        return self.streams[ordinal] == CAPTURED

    def load_kernel(self, ordinal, cubin, symbol):
        return super().load_kernel(ordinal, cubin, f"{symbol}@{ordinal}")

    def make_launch(self, ordinal, kernel, config, block):
        assert kernel.endswith(f"@{ordinal}")
        return super().make_launch(ordinal, kernel, config, block)

    def places(self) -> list[tuple[int, int]]:
        """Device and stream of each launch since the last time."""
        found = [(int(record.symbol.partition("@")[2]), record.config.stream) for record in self.launches]
        del self.launches[:]
        return found


class TwoNativeDevices(TwoDevices, NativeFakeDriver):
    """Launches by the launcher in C."""

    @TwoDevices.here.setter
    def here(self, ordinal):
        self._here = ordinal
        self.cuda.set("stub_device", ordinal)
        for name, stream in zip(("stub_stream", "stub_other_stream"), self.streams, strict=True):
            self.cuda.set_handle(name, stream)

    def switch(self, ordinal, stream):
        super().switch(ordinal, stream)
        self.here = self.here

    @property
    def launches(self) -> list[Record]:
        for found in self.cuda.drain():
            (symbol,) = (name for name, size in self._sizes.items() if ctypes.addressof(size) == found.function)
            assert found.context == CONTEXT + int(symbol.partition("@")[2]), "in the context of another device"
            config = LaunchConfig(found.grid[0], found.block[0], found.shared_bytes, found.stream or 0, False)
            self._recorded.append(Record(symbol, config, bytes(found.bytes[: found.block_bytes])))
        return self._recorded

    @launches.setter
    def launches(self, value):
        self._recorded = value

    def handles(self, ordinal, kernel):
        function, context = super().handles(ordinal, kernel)
        return function, context + ordinal


DRIVERS = [
    TwoDevices,
    pytest.param(TwoNativeDevices, marks=pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")),
]
each_driver = pytest.mark.parametrize("driver_type", DRIVERS)


def make(driver_type, spec=DECODE, registers=128, **options):
    driver = driver_type(attributes_of=replace(GOOD, registers=registers))
    return driver, Kernels(load_spec(spec), open_driver=lambda: driver, read=fake_cubins, **options)


def long_scores():
    return {"scores": torch.zeros(3, 131072)}


# Name: (spec, registers of its kernels, a call's tensors, how it is called).
WAYS = {
    "decode": (DECODE, 128, without_out("decode"), lambda kernels, t: kernels.sparse_decode(**t)),
    "decode op": (
        DECODE,
        128,
        without_out("decode"),
        lambda kernels, t: OPS.sparse_decode(**t, kernels=kernels.handle),
    ),
    "topk": (TOPK_SPEC, 60, CALLS["topk"][2], lambda kernels, t: kernels.topk(**t, k=64, page_size=61)),
    "topk shared rows": (TOPK_SPEC, 60, long_scores, lambda kernels, t: kernels.topk(**t, k=64)),
    "topk op": (TOPK_SPEC, 60, long_scores, lambda kernels, t: OPS.topk(**t, k=64, kernels=kernels.handle)),
    "logits": (scored.MX, 128, CALLS["logits"][2], lambda kernels, t: kernels.indexer_logits(**t)),
    "ragged": (scored.MX, 128, CALLS["ragged"][2], lambda kernels, t: kernels.indexer_logits_ragged(**t)),
    "read": ("v32_kv_cache_h128", 40, without_out("read"), lambda kernels, t: kernels.kv_read(**t)),
    "index write": (INDEX, 40, CALLS["index write"][2], lambda kernels, t: kernels.index_write(**t)),
}


@each_driver
@pytest.mark.parametrize("way", WAYS)
def test_a_call_runs_where_its_tensors_lie(driver_type, way):
    spec, registers, tensors_of, call = WAYS[way]
    driver, kernels = make(driver_type, spec, registers)
    kernels.prepare([0, 1])
    kernels.freeze()
    assert sorted(driver.loads) == sorted(
        {f"{plan.symbol}@{ordinal}" for plan in kernels._on(0).plans for ordinal in (0, 1)}
    )
    tensors = tensors_of()
    for ordinal in (0, 1, 0, 1, 1, 0):
        driver.here = ordinal
        call(kernels, tensors)
        assert set(driver.places()) == {(ordinal, driver.streams[ordinal])}
    # The streams of either device are its own, and those called default have one handle.
    for first, second in ((0x11, 0x20), (0, 0)):
        driver.switch(0, first)
        driver.switch(1, second)
        for ordinal, stream in ((1, second), (0, first), (1, second), (0, first)):
            driver.here = ordinal
            call(kernels, tensors)
            assert set(driver.places()) == {(ordinal, stream)}


@each_driver
def test_a_plan_follows_the_stream_of_its_own_device(driver_type):
    driver, kernels = make(driver_type)
    plan = kernels.plan_sparse_decode(BATCH, S_Q, TOPK, num_splits=2, device=1)
    decode = partial(kernels.sparse_decode, **WAYS["decode"][2](), plan=plan)
    driver.here = 1
    for stream in (0x10, 0x11, 0):
        driver.switch(0, stream)
        decode()
    assert set(driver.places()) == {(1, 0x20)} and plan.stream == 0x20
    driver.switch(1, 0x21)
    with pytest.raises(GuardError, match=r"\[T-10\] plan: belongs to stream 0x20, the current stream is 0x21"):
        decode()
    plan.rebind()
    decode()
    assert set(driver.places()) == {(1, 0x21)}


@each_driver
def test_what_was_prepared_on_one_device_is_not_on_the_other(driver_type):
    driver, kernels = make(driver_type)
    kernels.prepare()
    kernels.freeze()
    tensors, call = WAYS["decode"][2](), WAYS["decode"][3]
    call(kernels, tensors)
    driver.here = 1
    with pytest.raises(FrozenError, match=r"needed but was not loaded on device 1 before freeze\(\)"):
        call(kernels, tensors)
    driver.here = 0
    call(kernels, tensors)
    assert {ordinal for ordinal, _ in driver.places()} == {0}


@each_driver
def test_a_capture_on_one_device_is_none_on_the_other(driver_type):
    driver, kernels = make(driver_type)
    kernels.prepare([0, 1])
    tensors, call = WAYS["decode"][2](), WAYS["decode"][3]
    driver.switch(1, CAPTURED)
    for ordinal in (0, 1):
        driver.here = ordinal
        if ordinal:
            with pytest.raises(FrozenError, match="call plan_sparse_decode before the capture"):
                call(kernels, tensors)
        else:
            call(kernels, tensors)
    plan = kernels.plan_sparse_decode(BATCH, S_Q, TOPK, device=0)
    assert plan is not None and {ordinal for ordinal, _ in driver.places()} == {0}


@each_driver
def test_a_device_of_another_arch_is_refused_by_its_name(driver_type):
    driver, kernels = make(driver_type)
    driver.second = replace(H200, name="fake B200", capability=(10, 0))
    with pytest.raises(DeviceError, match=r"v32_h16 is for .*device 1 \(fake B200\) is sm_100"):
        kernels.prepare([0, 1])
    driver.here = 1
    with pytest.raises(DeviceError, match=r"device 1 \(fake B200\)"):
        WAYS["decode"][3](kernels, WAYS["decode"][2]())
    driver.here = 0
    WAYS["decode"][3](kernels, WAYS["decode"][2]())


def test_a_device_may_be_the_default():
    driver, kernels = make(TwoDevices, device=1)
    assert kernels._default == 1
    kernels.prepare()
    assert {symbol.partition("@")[2] for symbol in driver.loads} == {"1"}
    with pytest.raises(DeviceError, match=r"device 2: expected one of"):
        make(TwoDevices, device=2)


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_the_context_of_another_device_is_current_again_behind_a_call():
    driver, kernels = make(TwoNativeDevices)
    tensors, call = WAYS["decode"][2](), WAYS["decode"][3]
    driver.here = 1
    driver.cuda.set_handle("stub_context", CONTEXT)
    for _ in range(3):
        call(kernels, tensors)
        assert ctypes.c_void_p.in_dll(driver.cuda.library, "stub_context").value == CONTEXT
    # Later calls ask about a capture as well, in the same context.
    assert set(driver.places()) == {(1, 0x20)} and driver.cuda.get("stub_pushes") == 5
    driver.cuda.set_handle("stub_context", CONTEXT + 1)
    call(kernels, tensors)
    assert driver.cuda.get("stub_pushes") == 5, "it was current"
