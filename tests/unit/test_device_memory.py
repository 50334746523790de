"""Where memory for an output runs out, the error names it, its bytes and a way out, and is torch's own as well."""

from functools import partial

import pytest
import torch
from fake_driver import FakeDriver
from native_driver import NativeFakeDriver
from test_native_entrances import CASES, OPS, TOPK_SPEC, given, make, plain

from dsagen.errors import DeviceError
from dsagen.runtime.device_memory import DeviceMemoryError, new_output, no_memory

# Ops that make outputs, with the one that is made first.
MAKERS = {
    "sparse_decode": "(?:out|workspace)",
    "sparse_decode_caches": "(?:out|workspace)",
    "topk": "out",
    "topk shared rows": "out",
    "indexer_logits": "out",
    "indexer_logits_ragged": "out",
    "indexer_logits_candidates": "out",
    "indexer_logits_blocks": "out",
    "kv_read": "out",
    "index_gather": "codes",
}


def ran_out(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.\nMore lines")


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("driver_type", [FakeDriver, NativeFakeDriver])
@pytest.mark.parametrize("name", MAKERS)
def test_an_output_that_cannot_be_had_is_named(name, driver_type, known, monkeypatch):
    spec, registers, tensors_of, call = CASES[name]
    driver, kernels = make(driver_type, spec, registers)
    tensors, run = tensors_of(), partial(call, getattr(OPS, name.split()[0]), kernels.handle)
    if known:
        run(tensors)
    count = len(driver.launches)
    with monkeypatch.context() as patch:
        # With the launcher in C a known call makes its outputs by itself, and leaves what fails to Python.
        for maker in ("empty", "empty_like"):
            patch.setattr(torch, maker, ran_out)
        patch.setattr(torch.Tensor, "new_empty", ran_out)
        with pytest.raises(
            DeviceMemoryError, match=rf"^{MAKERS[name]}: \d+ B cannot be had on cpu: .*(?:pass|plan)"
        ) as caught:
            run(tensors)
    assert isinstance(caught.value, torch.OutOfMemoryError) and "(CUDA out of memory. Tried" in str(caught.value)
    assert len(driver.launches) == count
    run(tensors)
    assert len(driver.launches) > count


def test_every_op_that_makes_outputs_is_among_them():
    makers = {name.split()[0] for name in MAKERS}
    assert makers == {name.split()[0] for name in CASES} - {
        name.split()[0] for name in CASES if "_out" in name or name.split()[0].endswith(("write", "convert"))
    }


def test_the_cpu_and_other_failures():
    with pytest.raises(DeviceMemoryError, match=rf"^out: {1 << 60} B cannot be had on cpu: .*DefaultCPUAllocator"):
        new_output("out", (1 << 60,), torch.uint8, torch.device("cpu"))
    found = no_memory("workspace", 3, torch.device("cpu"), "wait", RuntimeError("an earlier kernel failed\nand so on"))
    assert type(found) is DeviceError
    assert str(found) == "workspace: 3 B cannot be had on cpu: wait (an earlier kernel failed)"


def test_a_given_output_needs_no_memory(monkeypatch):
    _, kernels = make(FakeDriver, TOPK_SPEC, 60)
    monkeypatch.setattr(torch, "empty", ran_out)
    plain(k=64)(OPS.topk_out, kernels.handle, {"scores": torch.zeros(3, 500), "out": given("topk")()["out"]})
