"""The launcher in C: what it repeats by itself is to the byte what Python would launch, and the rest it declines."""

import gc
import re
import struct
import sys
import threading
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import logits_calls as scored
import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins
from native_driver import COMPILER, CONTEXT, NativeFakeDriver
from torch._subclasses.fake_tensor import FakeTensorMode

from dsagen.errors import DeviceError, DsagenError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.runtime.launch import OpLaunches
from dsagen.runtime.sparse_decode import DecodeTensors
from dsagen.spec import load_spec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

BATCH, S_Q, HEADS, TOPK, PAGES, PAGE = 2, 3, 16, 200, 5, 61


def make(driver, spec, registers=128):
    fake = driver(attributes_of=replace(GOOD, registers=registers))
    return fake, Kernels(load_spec(spec), open_driver=lambda: fake, read=fake_cubins)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


def decode_tensors(spec=None):
    return {
        "q": torch.randn(BATCH, S_Q, HEADS, 576).bfloat16(),
        "k_cache": torch.zeros(PAGES, PAGE, 1, 656, dtype=torch.uint8),
        "indices": ints(BATCH, S_Q, TOPK),
        "topk_length": ints(BATCH, S_Q),
        "attn_sink": torch.zeros(HEADS),
        "out": torch.zeros(BATCH, S_Q, HEADS, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(BATCH, HEADS, S_Q),
    }


def decode(num_splits, **changes):
    def prepare(kernels, workspace):
        plan = kernels.plan_sparse_decode(BATCH, S_Q, TOPK, num_splits=num_splits, workspace=workspace)
        return lambda tensors: kernels.sparse_decode(**tensors, plan=plan, **changes)

    return prepare


def decode_without(*names):
    return lambda: {name: tensor for name, tensor in decode_tensors().items() if name not in names}


def paged(columns, page, dtype=torch.uint8, padding=0):
    """A pool with `padding` bytes behind each page."""
    size = page * columns + padding
    return torch.zeros(PAGES * size, dtype=dtype).as_strided((PAGES, page, 1, columns), (size, columns, columns, 1))


def two_caches():
    """V4: rotary dims lie behind the codes of a page, so the kernel gets an address inside of each pool."""
    return {
        "q": torch.randn(BATCH, S_Q, HEADS, 512).bfloat16(),
        "k_cache": paged(584, 64, padding=64),
        "indices": ints(BATCH, S_Q, 100),
        "topk_length": ints(BATCH),
        "attn_sink": torch.zeros(HEADS),
        "extra_k_cache": paged(584, 2, padding=16),
        "extra_indices": ints(BATCH, S_Q, 300),
        "extra_topk_length": ints(BATCH),
        "out": torch.zeros(BATCH, S_Q, HEADS, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(BATCH, HEADS, S_Q),
    }


def one_of_two_caches():
    return {name: tensor for name, tensor in two_caches().items() if not name.startswith("extra_")}


def two_tensors():
    return {
        "q": torch.randn(BATCH, S_Q, HEADS, 576).bfloat16(),
        "k_cache": paged(512, PAGE, torch.bfloat16),
        "kpe_cache": paged(64, PAGE, torch.bfloat16),
        "indices": ints(BATCH, S_Q, 300),
        "out": torch.zeros(BATCH, S_Q, HEADS, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(BATCH, HEADS, S_Q),
    }


def planned(topk, extra_topk, num_splits):
    def prepare(kernels, workspace):
        plan = kernels.plan_sparse_decode(
            BATCH, S_Q, topk, extra_topk=extra_topk, num_splits=num_splits, workspace=workspace
        )
        return lambda tensors: kernels.sparse_decode(**tensors, plan=plan)

    return prepare


def topk_tensors(width, rows=3):
    def tensors():
        return {
            "scores": torch.zeros(rows, width),
            "lengths": ints(rows),
            "starts": ints(rows),
            "page_table": ints(7, 600),
            "table_of_row": ints(rows),
            "table_starts": ints(rows),
            "offsets": ints(rows),
            "out": ints(rows, 64),
            "raw": ints(rows, 64),
            "counts": ints(rows),
        }

    return tensors


def topk_plain(kernels, workspace):
    return lambda tensors: kernels.topk(**tensors, k=64, page_size=61, determinism="order", drop_neg_inf=True)


def topk_planned(width):
    def prepare(kernels, workspace):
        plan = kernels.plan_topk(3, width, 64, workspace=workspace)
        return lambda tensors: kernels.topk(**tensors, k=64, page_size=61, plan=plan)

    return prepare


def candidates(kernels, workspace):
    return lambda tensors: kernels.topk(**tensors, k=64)


def candidate_tensors():
    return {"scores": torch.zeros(3, 500), "candidate_blocks": ints(3, 63), "out": ints(3, 64)}


def op(name, **scalars):
    return lambda kernels, workspace: lambda tensors: getattr(kernels, name)(**tensors, **scalars)


def cache(columns=656, page=PAGE):
    return torch.zeros(PAGES, page, 1, columns, dtype=torch.uint8)


DECODE, TOPK_SPEC, CACHE, V41 = "v32_h16", "v32_topk_h128", "v32_kv_cache_h128", "v41_kv_cache_h64"
INDEX = "v32_index_cache_h128"
# Name: (spec, registers of its kernels, what makes a call's tensors, what gives a function of them).
CALLS = {
    "decode": (DECODE, 128, decode_tensors, decode(1)),
    "decode split": (DECODE, 128, decode_tensors, decode(2, softmax_scale=0.25)),
    "decode few": (DECODE, 128, decode_without("topk_length", "attn_sink"), decode(2)),
    "decode two caches": ("v4_h16", 128, two_caches, planned(100, 300, 1)),
    "decode two caches split": ("v4_h16", 128, two_caches, planned(100, 300, 2)),
    "decode one of two caches": ("v4_h16", 128, one_of_two_caches, planned(100, 0, 1)),
    "decode two tensors": ("contest_attention_h16", 128, two_tensors, planned(300, 0, 1)),
    "topk": (TOPK_SPEC, 60, topk_tensors(500), topk_plain),
    "topk many": (TOPK_SPEC, 60, topk_tensors(20_000, rows=140), topk_plain),
    "topk planned": (TOPK_SPEC, 60, topk_tensors(500), topk_planned(500)),
    "topk split": (TOPK_SPEC, 60, topk_tensors(300_000), topk_planned(300_000)),
    "topk candidates": (TOPK_SPEC, 60, candidate_tensors, candidates),
    "logits": (scored.MX, 128, scored.logits_tensors, op("indexer_logits", unscored_up_to=7, fill_neg_inf=True)),
    "logits plain": (scored.INDEXER, 128, scored.fp8_logits_tensors, op("indexer_logits", max_seq_len=40)),
    "listed": (scored.CANDIDATES, 128, scored.candidate_tensors_of_pages,
               op("indexer_logits_candidates", max_seq_len=9)),
    "blocks": (scored.CANDIDATES, 128, scored.block_tensors, op("indexer_logits_blocks", unscored_up_to=3)),
    "ragged": (scored.MX, 128, scored.ragged_tensors, op("indexer_logits_ragged", fill_neg_inf=True)),
    "write": (CACHE, 40, lambda: {"rows": torch.zeros(4, 576).bfloat16(), "k_cache": cache(), "slots": ints(4)},
              op("kv_write")),
    "write parts": (CACHE, 40, lambda: {"rows": torch.zeros(4, 512).bfloat16(), "k_pe": torch.zeros(4, 64).bfloat16(),
                                        "k_cache": cache(), "slots": torch.zeros(4, dtype=torch.int64)},
                    op("kv_write", extra=False)),
    "read": (CACHE, 40, lambda: {"k_cache": cache(), "slots": ints(4), "out": torch.zeros(4, 576).bfloat16()},
             op("kv_read")),
    "read table": (CACHE, 40, lambda: {"k_cache": cache(), "block_table": ints(2, 3), "row_starts": ints(3),
                                       "token_starts": ints(2), "out": torch.zeros(9, 576).bfloat16()},
                   op("kv_read", rows=9)),
    "convert": (V41, 40, lambda: {"source": torch.zeros(3, 4, 1, 528, dtype=torch.uint8),
                                  "target": torch.zeros(4, 4, 1, 528, dtype=torch.uint8),
                                  "source_slots": ints(5), "target_slots": ints(5)}, op("kv_convert")),
    "index write": (INDEX, 40, lambda: {"keys": torch.zeros(4, 128).bfloat16(), "k_cache": cache(132),
                                        "slots": torch.zeros(3, dtype=torch.int64)}, op("index_write")),
    "index gather": (INDEX, 40, lambda: {"k_cache": cache(132), "block_table": ints(2, 3), "row_starts": ints(3),
                                         "token_starts": ints(2), "codes": torch.zeros(9, 128, dtype=torch.uint8),
                                         "scales": torch.zeros(9)}, op("index_gather", rows=9)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_is_the_same_to_the_byte(name, monkeypatch):
    spec, registers, tensors_of, prepare = CALLS[name]
    in_python, in_c = (make(driver, spec, registers) for driver in (FakeDriver, NativeFakeDriver))
    # Both plans work in one workspace, so that its addresses are the same.
    workspace = torch.zeros(64 << 20, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]
    run_python, run_c = (prepare(kernels, workspace) for _, kernels in (in_python, in_c))
    checked = []
    launch = OpLaunches.launch
    monkeypatch.setattr(OpLaunches, "launch", lambda self, *call: (checked.append(self), launch(self, *call))[1])
    kept = []
    for _ in range(4):
        kept.append(tensors_of())
        run_python(kept[-1])
        run_c(kept[-1])
    expected, found = in_python[0].launches, in_c[0].launches
    assert len(expected) == len(found) == (8 if "split" in name or name == "decode few" else 4)
    assert found == expected
    assert len({record.block for record in found}) >= 4, "the addresses are to differ"
    # Python looked at the first call only.
    assert sum(launches._calls is not None for launches in checked) == 1


def without_out(name, drop=("out", "lse")):
    tensors = CALLS[name][2]
    return lambda: {key: value for key, value in tensors().items() if key not in drop}


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("decode", lambda kernels, tensors: kernels.sparse_decode(**tensors)),
        ("topk", lambda kernels, tensors: kernels.topk(**tensors, k=64, page_size=61)),
        ("topk split", lambda kernels, tensors: kernels.topk(**tensors, k=64, page_size=61)),
        ("read", lambda kernels, tensors: kernels.kv_read(**tensors)),
    ],
)
def test_calls_without_plan_and_outputs_are_repeated_too(name, run, monkeypatch):
    spec, registers, *_ = CALLS[name]
    driver, kernels = make(NativeFakeDriver, spec, registers)
    checked = []
    launch = OpLaunches.launch
    monkeypatch.setattr(OpLaunches, "launch", lambda self, *call: (checked.append(1), launch(self, *call))[1])
    results = [run(kernels, without_out(name)()) for _ in range(3)]
    assert len(checked) == 1
    outs = [result[0] if isinstance(result, tuple) else result for result in results]
    assert len({out.data_ptr() for out in outs}) == 3
    assert len({(out.shape, out.dtype, out.stride()) for out in outs}) == 1
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    last = [record for record in driver.launches if "count" not in record.symbol]
    where = [struct.unpack_from("<Q", record.block, _offset(plans[record.symbol], "out"))[0] for record in last]
    assert set(where) == {out.data_ptr() for out in outs}


@pytest.mark.parametrize("name", ["decode", "topk", "read"])
def test_outputs_that_cannot_be_had_leave_the_call_to_the_checks(name, monkeypatch):
    _, kernels = make(NativeFakeDriver, *CALLS[name][:2])
    tensors = without_out(name, ("out", "lse", "raw", "counts"))()
    call = {"decode": kernels.sparse_decode, "topk": partial(kernels.topk, k=64, page_size=61), "read": kernels.kv_read}
    call[name](**tensors)

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    for name_of_maker in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name_of_maker, no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        call[name](**tensors)


def test_every_op_is_among_those_that_are_compared():
    kinds = "decode topk logits blocks ragged listed write read convert index"
    assert {name.split()[0] for name in CALLS} == set(kinds.split())


class Subclass(torch.Tensor):
    pass


def fake(tensor):
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def negated(tensor):
    return torch.complex(torch.zeros_like(tensor), tensor).conj().imag


# What is done to a call's tensors, and how Python refuses the call.
ODD = {
    "subclass": (lambda t: t | {"q": t["q"].as_subclass(Subclass)}, r"\[T-01\] q: Subclass"),
    "fake": (lambda t: t | {"q": fake(t["q"])}, r"\[T-01\] q: FakeTensor"),
    "fake cache": (lambda t: t | {"k_cache": fake(t["k_cache"])}, r"\[T-01\] k_cache: FakeTensor"),
    "no tensor": (lambda t: t | {"q": [1.0]}, r"\[T-01\] q: expected a torch.Tensor, found list"),
    "grad": (lambda t: t | {"q": t["q"].clone().requires_grad_()}, r"\[T-02\] q: requires grad"),
    "grad of the sink": (lambda t: t | {"attn_sink": torch.nn.Parameter(t["attn_sink"])}, r"\[T-02\] attn_sink"),
    "meta": (lambda t: t | {"q": t["q"].to("meta")}, r"\[T-03\] q: on meta"),
    "dtype": (lambda t: t | {"q": t["q"].half()}, r"\[T-04\] q: dtype float16"),
    "batch": (lambda t: t | {"q": t["q"][:1]}, r"\[T-0[69]\]"),
    "last stride": (lambda t: t | {"q": t["q"].transpose(2, 3).contiguous().transpose(2, 3)}, r"\[T-07\] q"),
    "alignment": (lambda t: t | {"q": torch.zeros(BATCH * S_Q * HEADS * 576 + 1).bfloat16()[1:].view(t["q"].shape)},
                  r"\[SD-25\] q: address"),
    "row stride": (lambda t: t | {"q": torch.zeros(BATCH, S_Q, HEADS, 577).bfloat16()[..., :576]}, r"\[SD-13\] q"),
    "freed": (lambda t: t | {"q": freed(t["q"])}, r"\[T-14\] q: has no memory"),
    "negated": (lambda t: t | {"attn_sink": negated(t["attn_sink"])}, r"\[T-14\] attn_sink: is negated lazily"),
    "sparse": (lambda t: t | {"attn_sink": t["attn_sink"].to_sparse()}, r"\[T-14\] attn_sink: has the layout"),
    "overlap": (lambda t: t | {"out": t["q"].view(-1)[: t["out"].numel()].view(t["out"].shape)},
                r"\[T-08\] out: its memory overlaps that of q"),
    "overlap inside": (lambda t: t | {"indices": t["out"].view(-1).view(torch.int32)[4:][: BATCH * S_Q * TOPK]
                                      .view(BATCH, S_Q, TOPK)}, r"\[T-08\] out: its memory overlaps that of indices"),
    "scale": (lambda t: t | {"softmax_scale": float("nan")}, r"\[T-12\] softmax_scale: nan"),
    "scale type": (lambda t: t | {"softmax_scale": True}, r"\[T-12\] softmax_scale: expected a number, found bool"),
    "scale size": (lambda t: t | {"softmax_scale": 10**400}, r"\[T-12\] softmax_scale: an integer of"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_left_to_the_checks(name):
    driver, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK), decode_tensors()
    kernels.sparse_decode(**tensors, plan=plan)
    count = len(driver.launches)
    change, message = ODD[name]
    with pytest.raises(GuardError, match=message):
        kernels.sparse_decode(**change(tensors), plan=plan)
    assert len(driver.launches) == count
    kernels.sparse_decode(**tensors, plan=plan)
    assert len(driver.launches) == 2 * count


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_tensors_inside_a_transform_are_declined(transform):
    driver, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK), decode_tensors()
    kernels.sparse_decode(**tensors, plan=plan)
    count = len(driver.launches)

    def call(q):
        kernels.sparse_decode(**tensors | {"q": q}, plan=plan)
        return q.float().sum()

    wrapped = {"vmap": torch.vmap, "grad": torch.func.grad, "functionalize": torch.func.functionalize}[transform](call)
    with pytest.raises((GuardError, RuntimeError)):
        wrapped(tensors["q"][None] if transform == "vmap" else tensors["q"])
    assert len(driver.launches) == count


def test_parameters_without_grad_and_equal_scalars_are_repeated():
    _, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK), decode_tensors()
    kernels.sparse_decode(**tensors, plan=plan, softmax_scale=0.5)
    call = [tensors.get(name) for name in DecodeTensors._fields]
    assert plan.repeat(*call, 1.0 / 2) is True
    call[4] = torch.nn.Parameter(call[4], requires_grad=False)
    assert plan.repeat(*call, 0.5) is True
    for other in (None, 0.25, 1, True, "0.5"):
        assert plan.repeat(*call, other) is False
    # A number of another type is another call, though it be equal.
    kernels.sparse_decode(**tensors, plan=plan, softmax_scale=1)
    assert plan.repeat(*call, 1) and not plan.repeat(*call, 1.0) and not plan.repeat(*call, True)
    with pytest.raises(TypeError, match="a call has 14 tensors and 1 scalars, got 2 values"):
        plan.repeat(*call[:2])


def test_a_plan_repeats_on_its_stream_only():
    driver, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK), decode_tensors()
    call = [tensors.get(name) for name in DecodeTensors._fields]
    assert plan.repeat(*call, None) is False
    kernels.sparse_decode(**tensors, plan=plan)
    assert plan.repeat(*call, None) is True
    driver.stream = 7
    with pytest.raises(GuardError, match=r"\[T-10\] plan: belongs to stream 0x0, the current stream is 0x7"):
        kernels.sparse_decode(**tensors, plan=plan)
    plan.rebind()
    assert plan.repeat(*call, None) is False
    kernels.sparse_decode(**tensors, plan=plan)
    assert plan.repeat(*call, None) is True
    assert {record.config.stream for record in driver.launches} == {0, 7}
    driver.cuda.set("stub_stream_fails", 1)
    assert plan.repeat(*call, None) is False


def test_tensors_in_a_lent_workspace_are_declined():
    _, kernels = make(NativeFakeDriver, DECODE)
    size = kernels.sparse_decode_workspace_bytes(BATCH, S_Q, TOPK, num_splits=2)
    memory = torch.zeros(size + 256, dtype=torch.uint8)
    workspace = memory[-memory.data_ptr() % 256 :][:size]
    plan = kernels.plan_sparse_decode(BATCH, S_Q, TOPK, num_splits=2, workspace=workspace)
    tensors = decode_tensors()
    kernels.sparse_decode(**tensors, plan=plan)
    inside = workspace[: BATCH * S_Q * TOPK * 4].view(torch.int32).view(BATCH, S_Q, TOPK)
    with pytest.raises(GuardError, match=r"\[T-08\] workspace: its memory overlaps that of indices"):
        kernels.sparse_decode(**tensors | {"indices": inside}, plan=plan)


def test_a_refused_launch_names_what_was_launched():
    driver, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK, num_splits=2), decode_tensors()
    kernels.sparse_decode(**tensors, plan=plan)
    driver.launch_error = "CUDA_ERROR_LAUNCH_FAILED"
    address = tensors["q"].data_ptr()
    with pytest.raises(
        DeviceError,
        match=rf"^sparse_decode: sparse_decode-main-.* failed on device 0: .*FAILED.* q={address}, .*SYNC=1",
    ):
        kernels.sparse_decode(**tensors, plan=plan)
    driver.launch_error = ""
    kernels.sparse_decode(**tensors, plan=plan)


def test_the_devices_context_is_current_during_launches():
    driver, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK, num_splits=2), decode_tensors()
    for _ in range(2):
        kernels.sparse_decode(**tensors, plan=plan)
    assert driver.cuda.get("stub_pushes") == 2
    driver.cuda.set_handle("stub_context", CONTEXT)
    kernels.sparse_decode(**tensors, plan=plan)
    assert driver.cuda.get("stub_pushes") == 2, "it was current"
    assert len(driver.launches) == 6


def test_threads_that_share_a_plan_keep_its_kernels_together():
    driver, kernels = make(NativeFakeDriver, DECODE)
    plan = kernels.plan_sparse_decode(BATCH, S_Q, TOPK, num_splits=2)
    driver.cuda.set("stub_delay_us", 100)
    errors = []

    def work():
        tensors = decode_tensors()
        try:
            for _ in range(40):
                kernels.sparse_decode(**tensors, plan=plan)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    outs = [record.block[_offset(plans[record.symbol], "out") :][:8] for record in driver.launches]
    assert len(outs) == 480 and outs[::2] == outs[1::2]
    assert len(set(outs)) == 6


def _offset(plan, name):
    return next(field.offset_bytes for field in plan.params if field.name == name)


def test_nothing_is_kept_of_calls_and_their_tensors():
    _, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK), decode_tensors()
    kernels.sparse_decode(**tensors, plan=plan)
    before = {name: sys.getrefcount(tensor) for name, tensor in tensors.items()}
    for _ in range(100):
        kernels.sparse_decode(**tensors, plan=plan)
    assert {name: sys.getrefcount(tensor) for name, tensor in tensors.items()} == before
    workspace = weakref.ref(plan)
    del plan
    gc.collect()
    assert workspace() is None


def test_a_parameter_that_no_tensor_is_named_for_is_an_error(monkeypatch):
    for module, table, message in (
        ("sparse_decode", "FORM", "no tensor of sparse_decode is named for its parameter 'lse_accum'"),
    ):
        form = getattr(sys.modules[f"dsagen.runtime.{module}"], table)
        monkeypatch.setattr(f"dsagen.runtime.{module}.{table}", replace(form, held=frozenset()))
        _, kernels = make(NativeFakeDriver, DECODE)
        with pytest.raises(DsagenError, match=message):
            kernels.sparse_decode(**decode_tensors(), plan=kernels.plan_sparse_decode(BATCH, S_Q, TOPK))
        wrong = form.addresses | {"q": "k_cache"}
        monkeypatch.setattr(f"dsagen.runtime.{module}.{table}", replace(form, addresses=wrong))
        _, kernels = make(NativeFakeDriver, DECODE)
        with pytest.raises(DsagenError, match="its parameter 'q' does not lead into k_cache"):
            kernels.sparse_decode(**decode_tensors(), plan=kernels.plan_sparse_decode(BATCH, S_Q, TOPK))


def test_guards_ask_of_addresses_no_more_than_the_launcher_compares():
    """A key tells addresses apart by their last four bits; a lent workspace is checked when its plan is made."""
    families = Path(sys.modules["dsagen"].__file__).parent / "families"
    asked = {
        (path.parent.name, name, int(modulus))
        for path in families.glob("*/guards.py")
        for name, modulus in re.findall(r"(\w*address) % (\d+)", path.read_text())
    }
    assert len(asked) >= 5
    assert {name for _, name, modulus in asked if 16 % modulus} <= {"workspace_address"}
