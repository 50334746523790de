"""Tensors without memory of their own, borrowed workspaces, copies of plans, and arguments of another kind."""

import copy
import pickle
import threading

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins, unpack
from torch._subclasses.fake_tensor import FakeTensorMode

from dsagen.errors import DeviceError, DsagenError, GuardError, SpecError
from dsagen.matrix import expand
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

B, S, H, TOPK = 4, 1, 16, 256
Q, OUT = (B, S, H, 576), (B, S, H, 512)


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def kernels(driver):
    return Kernels(load_spec("v32_h16"), open_driver=lambda: driver, read=fake_cubins)


def tensors(**changes):
    return {
        "q": torch.zeros(Q, dtype=torch.bfloat16),
        "k_cache": torch.zeros(10, 64, 1, 656, dtype=torch.uint8),
        "indices": torch.zeros(B, S, TOPK, dtype=torch.int32),
        **changes,
    }


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def nested():
    return torch.nested.nested_tensor([torch.zeros(S, H, 576, dtype=torch.bfloat16)] * B)


# ---- memory


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("q", lambda: torch.zeros(Q, dtype=torch.bfloat16).to_sparse(), "has the layout sparse_coo"),
        ("q", lambda: torch.zeros(4, 4, dtype=torch.bfloat16).to_sparse_csr(), "has the layout sparse_csr"),
        ("indices", lambda: torch.ones(B, S, TOPK, dtype=torch.int32).to_sparse(), "has the layout sparse_coo"),
        ("q", nested, "is a nested tensor"),
        ("q", lambda: torch._neg_view(torch.zeros(Q, dtype=torch.bfloat16)), "is negated lazily"),
        ("lse", lambda: torch.zeros(B, H, S, dtype=torch.complex64).conj().imag, "is negated lazily"),
        ("q", lambda: freed(torch.zeros(Q, dtype=torch.bfloat16)), "has no memory of its own"),
        ("k_cache", lambda: freed(torch.zeros(10, 64, 1, 656, dtype=torch.uint8)), "has no memory of its own"),
        ("attn_sink", lambda: freed(torch.zeros(H)), "has no memory of its own"),
        ("out", lambda: freed(torch.zeros(OUT, dtype=torch.bfloat16)), "has no memory of its own"),
    ],
)
def test_a_tensor_whose_values_are_not_at_its_address(kernels, driver, name, tensor, found):
    fitting = {"lse": torch.zeros(B, H, S), "attn_sink": torch.zeros(H), "out": torch.zeros(OUT, dtype=torch.bfloat16)}
    # One that fits has been seen before, so that a remembered signature would be found.
    kernels.sparse_decode(**tensors(**{key: value for key, value in fitting.items() if key == name}))
    launches = len(driver.launches)
    with pytest.raises(GuardError) as caught:
        kernels.sparse_decode(**tensors(**{name: tensor()}))
    assert str(caught.value).startswith(f"[T-14] {name}: {found}")
    assert len(driver.launches) == launches


def test_transforms_of_torch_are_refused(kernels, driver):
    given = tensors()
    k_cache, indices = given["k_cache"], given["indices"]

    def op(q):
        return kernels.sparse_decode(q, k_cache, indices)[0]

    with pytest.raises(GuardError, match=r"^\[T-14\] q: has no memory of its own"):
        torch.vmap(op)(torch.zeros(2, *Q, dtype=torch.bfloat16))
    with pytest.raises(GuardError, match=r"^\[T-02\] q: has a forward-mode tangent"):
        torch.func.jvp(op, (given["q"],), (given["q"],))
    with pytest.raises(GuardError, match=r"^\[T-14\] q: has no memory of its own"):
        torch.func.functionalize(op)(given["q"])
    assert driver.launches == []


@pytest.mark.parametrize("num_splits", [1, 2])
def test_nothing_is_allocated_under_a_mode_that_fakes_memory(kernels, driver, num_splits):
    plan = kernels.plan_sparse_decode(B, S, TOPK, num_splits=num_splits)
    given = tensors()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(GuardError, match=r"^\[T-01\] out: FakeTensor is a tensor subclass"):
            kernels.sparse_decode(**given, plan=plan)
        with pytest.raises(GuardError, match=r"^\[T-01\] workspace: FakeTensor is a tensor subclass"):
            kernels.plan_sparse_decode(B, S, TOPK, num_splits=2)
        with pytest.raises(GuardError, match=r"^\[T-01\] workspace: FakeTensor is a tensor subclass"):
            kernels.sparse_decode(**given)
    assert driver.launches == []
    # No plan with such a workspace was kept for calls to come.
    kernels.sparse_decode(**given)
    combine = expand(kernels.spec).plans()[-1]
    assert unpack(driver.launches[-1].block, combine)["o_accum"] != 0


# ---- workspace and plans


@pytest.fixture
def lent(kernels):
    """A plan whose workspace is the begin of a large buffer, and that buffer."""
    size = kernels.sparse_decode_workspace_bytes(B, S, TOPK, num_splits=2)
    raw = torch.zeros(size + (1 << 20), dtype=torch.uint8)
    buffer = raw[-raw.data_ptr() % 256 :]
    return kernels.plan_sparse_decode(B, S, TOPK, num_splits=2, workspace=buffer), buffer


@pytest.mark.parametrize(("name", "shape"), [("q", Q), ("out", OUT)])
def test_a_tensor_inside_the_lent_workspace_is_refused(kernels, driver, lent, name, shape):
    plan, buffer = lent
    count = torch.Size(shape).numel()

    def view(start):
        return buffer[start : start + 2 * count].view(torch.bfloat16).view(shape)

    with pytest.raises(GuardError) as caught:
        kernels.sparse_decode(**tensors(**{name: view(256)}), plan=plan)
    assert str(caught.value) == (
        f"[T-08] workspace: its memory overlaps that of {name}: pass one that serves nothing else"
    )
    assert driver.launches == []
    # Bytes of the buffer that the plan does not use are the caller's.
    kernels.sparse_decode(**tensors(**{name: view(-(-plan.workspace_bytes // 256) * 256)}), plan=plan)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_plans_nor_kernels_are_copied(kernels, duplicate):
    with pytest.raises(DsagenError, match=r"a SparseDecodePlan .* is neither copied nor pickled: make another one"):
        duplicate(kernels.plan_sparse_decode(B, S, TOPK))
    with pytest.raises(DsagenError, match=r"Kernels .* neither copied nor pickled: call dsagen\.load"):
        duplicate(kernels)


def test_a_workspace_that_cannot_be_had(kernels, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(DeviceError) as caught:
        kernels.plan_sparse_decode(B, S, TOPK, num_splits=2)
    assert str(caught.value) == (
        "workspace: 262656 B cannot be had on cpu: plan a smaller batch or fewer splits (CUDA out of memory.)"
    )


def test_a_failed_launch_leaves_the_plan_usable(kernels, driver):
    plan = kernels.plan_sparse_decode(B, S, TOPK, num_splits=2)
    driver.launch_error = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(DeviceError):
        kernels.sparse_decode(**tensors(), plan=plan)
    driver.launch_error = ""
    out, _ = kernels.sparse_decode(**tensors(), plan=plan)
    combine = expand(kernels.spec).plans()[-1]
    assert unpack(driver.launches[-1].block, combine)["out"] == out.data_ptr()


def test_threads_share_kernels(kernels, driver):
    problems = []

    def work(seed):
        for step in range(20):
            batch, topk = 1 + (seed + step) % 3, 64 * (1 + step % 4)
            given = tensors(
                q=torch.zeros(batch, S, H, 576, dtype=torch.bfloat16),
                indices=torch.zeros(batch, S, topk, dtype=torch.int32),
            )
            try:
                out, lse = kernels.sparse_decode(**given)
                assert (out.shape[0], lse.shape[0]) == (batch, batch)
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(driver.launches) >= 160


# ---- arguments of another kind


@pytest.mark.parametrize("devices", [0, "cpu", True, 1.5])
def test_prepare_wants_a_list(kernels, devices):
    with pytest.raises(DeviceError, match=r"^devices: expected a list of devices such as \[0, 'cuda:1'\], found "):
        kernels.prepare(devices)


@pytest.mark.parametrize("archs", ["sm_90a", b"sm_90a", [], (), 5, {"sm_90a"}])
def test_archs_are_a_list(archs):
    with pytest.raises(SpecError, match=r"^archs: expected a list such as \['sm_90a'\], or None for all of them"):
        Kernels(load_spec("v32_h16"), archs=archs, open_driver=FakeDriver, read=fake_cubins)


def test_an_arch_that_is_named_twice_counts_once():
    spec = load_spec("v32_h16")
    assert expand(spec, ("sm_90a", "9.0a")) == expand(spec)


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (10**400, "an integer of 1329 bits"),
        (-(10**5000), "an integer of 16610 bits"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (3e38, "3e+38"),
    ],
    ids=["int", "long", "nan", "inf", "fp32"],
)
def test_a_scale_beyond_fp32(kernels, scale, found):
    with pytest.raises(GuardError) as caught:
        kernels.sparse_decode(**tensors(), softmax_scale=scale)
    assert str(caught.value).startswith(f"[T-12] softmax_scale: {found} is no finite fp32 number")


@pytest.mark.parametrize("op", ["decode", "", None, 3, ["topk"], torch.zeros(3)])
def test_explain_of_what_is_no_op(kernels, op):
    with pytest.raises(GuardError) as caught:
        kernels.explain(op, batch=1)
    known = "sparse_decode, topk, indexer_logits, kv_cache, index_cache, decode_step"
    assert str(caught.value) == f"[T-11] op: {op!r} is no op: expected one of {known}"


@pytest.mark.parametrize("device", [torch.zeros(3), [0], True, "cuda:x", 7])
def test_a_device_that_there_is_not(kernels, device):
    with pytest.raises(DeviceError, match=r"^device .*: expected one of the 1 CUDA device"):
        kernels.plan_sparse_decode(B, S, TOPK, device=device)


def test_a_size_too_long_to_print(kernels):
    with pytest.raises(GuardError) as caught:
        kernels.plan_sparse_decode(10**5000, S, TOPK)
    text = "[SD-00] batch: an integer of 16610 bits is outside 0..2147483647: pass how many requests a call has"
    assert str(caught.value) == text


def test_a_call_without_rows_is_not_checked_for_values(driver, monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    kernels = Kernels(load_spec("v32_h16"), open_driver=lambda: driver, read=fake_cubins)
    given = tensors(
        q=torch.zeros(0, S, H, 576, dtype=torch.bfloat16), indices=torch.zeros(0, S, TOPK, dtype=torch.int32)
    )
    length = torch.zeros(0, dtype=torch.int32)
    out, lse = kernels.sparse_decode(**given, topk_length=length, plan=kernels.plan_sparse_decode(0, S, TOPK))
    assert (tuple(out.shape), tuple(lse.shape), driver.launches) == ((0, S, H, 512), (0, H, S), [])
