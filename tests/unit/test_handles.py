"""Names of loaded kernels, and what torch's ops cost a call: a shared plan that is found again without a check."""

import gc

import pytest
import torch
from native_driver import NativeFakeDriver
from test_runtime_launch import inputs, make

from dsagen.errors import GuardError
from dsagen.runtime import torch_ops
from dsagen.runtime.handles import find
from dsagen.runtime.launch import OpLaunches
from dsagen.runtime.torch_ops import SCHEMAS

pytestmark = pytest.mark.usefixtures("each_launcher")
OPS = torch.ops.dsagen


def test_a_handle_finds_its_kernels_while_they_live():
    _, kernels = make("v32_h8")
    handle = kernels.handle
    assert find(handle) is kernels
    _, other = make("v32_h8")
    assert other.handle == handle[:-1] + "1" and find(other.handle) is other
    del kernels
    gc.collect()
    assert find(handle) is other
    _, third = make("v32_h8")
    assert third.handle == handle, "the number is free again"
    del other, third
    gc.collect()
    with pytest.raises(GuardError, match=rf"^\[T-19\] kernels: none that are loaded have the handle '{handle}': load"):
        find(handle)


def test_a_handle_tells_specs_and_drivers_apart():
    handles = {make(spec, **changes)[1].handle.partition("#")[0] for spec, changes in (
        ("v32_h8", {}), ("v32_h16", {}), ("v32_h8", {"topk": 1024}), ("v32_h8", {"lse": {"base": 2}}))}  # fmt: skip
    assert len(handles) == 4


def test_a_handle_tells_ops_of_other_arguments_apart(monkeypatch):
    """Inductor keeps code by the graph's text, in which an argument that is left out does not show."""
    _, kernels = make("v32_h8")
    monkeypatch.setitem(torch_ops.SCHEMAS, "topk", torch_ops.SCHEMAS["topk"].replace("offsets", "shifts"))
    _, changed = make("v32_h8")
    assert kernels.handle.endswith("#0") and changed.handle.endswith("#0") and changed.handle != kernels.handle


def test_an_op_without_kernels_of_its_name_is_refused():
    for name in SCHEMAS:
        op = getattr(OPS, name).default
        # Those that a call has to bring come first.
        values = [_filler(argument) for argument in op._schema.arguments if not argument.has_default_value()]
        with pytest.raises(GuardError, match=r"\[T-19\]"):
            op(*values)


def _filler(argument):
    kinds = {"Tensor": torch.zeros(1), "str": "none", "int": 1}
    return kinds[str(argument.type)]


def test_a_shared_plan_is_found_again_without_a_check(monkeypatch):
    driver, kernels = make()
    checked = []
    launch = OpLaunches.launch
    monkeypatch.setattr(OpLaunches, "launch", lambda self, *call: (checked.append(1), launch(self, *call))[1])
    tensors = inputs()
    for _ in range(3):
        OPS.sparse_decode(*tensors, kernels.handle)
        kernels.sparse_decode(*tensors)
    assert len(checked) == (1 if type(driver) is NativeFakeDriver else 6)
    assert len(kernels._plans._plans) == 1
    # Another split count is another plan.
    OPS.sparse_decode(*tensors, kernels.handle, num_splits=1)
    assert len(kernels._plans._plans) == 2
    driver.capturing = True
    kernels.sparse_decode(*tensors)
    assert len(kernels._plans._pinned) == 1


def test_calls_that_do_not_fit_are_refused_with_a_shared_plan_at_hand():
    _, kernels = make()
    q, k_cache, indices = inputs()
    kernels.sparse_decode(q, k_cache, indices)
    for call, message in (
        (([], k_cache, indices), r"\[T-01\] q"),
        ((q, k_cache, [1]), r"\[T-01\] indices"),
        ((q, k_cache, indices[0]), r"\[T-05\] indices"),
        ((q.to("meta"), k_cache, indices), r"\[T-03\]"),
        ((q, k_cache, indices.to("meta")), r"\[T-03\]"),
        ((q[:1], k_cache, indices), r"\[T-06\] indices"),
    ):
        with pytest.raises(GuardError, match=message):
            kernels.sparse_decode(*call)
