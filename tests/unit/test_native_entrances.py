"""Calls without a plan, without outputs and through torch's ops, as the launcher in C repeats them: to the byte."""

import gc
import struct
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
from fake_driver import FakeDriver
from logits_calls import CANDIDATES, MX
from native_driver import COMPILER, NativeFakeDriver, recording_cuda
from test_native_launcher import (
    BATCH,
    CACHE,
    CALLS,
    DECODE,
    HEADS,
    INDEX,
    S_Q,
    TOPK,
    TOPK_SPEC,
    V41,
    decode_tensors,
    ints,
    make,
)
from test_runtime_topk import blocks
from torch._subclasses.fake_tensor import FakeTensorMode

from dsagen.errors import DeviceError, GuardError
from dsagen.runtime import native, torch_ops
from dsagen.runtime.cache_ops import CacheOps
from dsagen.runtime.decode_ops import DecodeOps
from dsagen.runtime.entrances import OP_CALLS, base_of
from dsagen.runtime.index_cache_ops import IndexCacheOps
from dsagen.runtime.indexer_ops import IndexerOps
from dsagen.runtime.launch import OpLaunches
from dsagen.runtime.sparse_decode import DecodeTensors
from dsagen.runtime.topk_ops import TopkOps

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

OPS = torch.ops.dsagen


@pytest.fixture
def entered(monkeypatch):
    """Names of the methods that a call of an op has run in Python."""
    found = []
    for part, names in (
        (DecodeOps, ["decode_with_shared_plan"]), (TopkOps, ["topk"]),
        (CacheOps, ["kv_write", "kv_read", "kv_convert"]),
        (IndexCacheOps, ["index_write", "index_gather"]),
        (IndexerOps, ["indexer_logits", "indexer_logits_ragged", "indexer_logits_candidates",
                      "indexer_logits_blocks"]),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(part, name, _noted(getattr(part, name), found))
    return found


def _noted(method, found):
    def run(self, *values, **named):
        found.append(method.__name__)
        return method(self, *values, **named)

    return run


def given(name, *drop):
    return lambda: {key: value for key, value in CALLS[name][2]().items() if key not in drop}


def plain(**scalars):
    return lambda op, handle, tensors: op(**tensors, kernels=handle, **scalars)


def long_scores():
    return torch.zeros(3, 524288)


def by_position(op, handle, tensors):
    q, k_cache, indices, topk_length, attn_sink = tensors.values()
    return op(q, k_cache, indices, handle, topk_length, attn_sink)


BLOCK_OUTPUTS = ("out", "block_scores", "block_counts")
# Op: (spec, registers of its kernels, a call's tensors, how it is called).
CASES = {
    "sparse_decode": (DECODE, 128, given("decode", "out", "lse"), plain(softmax_scale=0.25, num_splits=2)),
    "sparse_decode by position": (DECODE, 128, given("decode", "out", "lse"), by_position),
    "sparse_decode_out": (DECODE, 128, given("decode"), plain()),
    "sparse_decode_caches": ("v4_h16", 128, given("decode two caches", "out", "lse"), plain()),
    "sparse_decode_caches_out": ("contest_attention_h16", 128, given("decode two tensors"), plain(num_splits=1)),
    "topk": (TOPK_SPEC, 60, given("topk", "out", "raw", "counts"), plain(k=64, page_size=61, determinism="order")),
    "topk shared rows": (TOPK_SPEC, 60, lambda: {"scores": long_scores()}, plain(k=64)),
    "topk_out shared rows": (TOPK_SPEC, 60, lambda: {"scores": long_scores(), "out": ints(3, 64)}, plain(k=64)),
    "topk_out": (TOPK_SPEC, 60, given("topk"), plain(k=64, page_size=61, drop_neg_inf=True)),
    "indexer_logits": (MX, 128, given("logits", "out"), plain(max_seq_len=40, fill_neg_inf=True)),
    "indexer_logits_out": (MX, 128, given("logits"), plain(unscored_up_to=9)),
    "indexer_logits_blocks": (CANDIDATES, 128, given("blocks", *BLOCK_OUTPUTS), plain(max_seq_len=256)),
    "indexer_logits_blocks_out": (CANDIDATES, 128, given("blocks"), plain(unscored_up_to=9)),
    "indexer_logits_ragged": (MX, 128, given("ragged", "out"), plain()),
    "indexer_logits_ragged compressed": (MX, 128, given("ragged", "out"), plain(max_window=20, unscored_up_to=1)),
    "indexer_logits_ragged_out": (MX, 128, given("ragged"), plain(fill_neg_inf=True)),
    "indexer_logits_candidates": (CANDIDATES, 128, given("listed", "out"), plain()),
    "indexer_logits_candidates_out": (CANDIDATES, 128, given("listed"), plain()),
    "kv_write": (CACHE, 40, given("write parts"), plain()),
    "kv_read": (CACHE, 40, given("read", "out"), plain()),
    "kv_read table": (CACHE, 40, given("read table", "out"), plain(rows=9)),
    "kv_read_out": (CACHE, 40, given("read"), plain()),
    "kv_convert": (V41, 40, given("convert"), plain(extra=False)),
    "index_write": (INDEX, 40, given("index write"), plain()),
    "index_gather": (INDEX, 40, given("index gather", "codes", "scales"), plain(rows=9)),
    "index_gather_out": (INDEX, 40, given("index gather"), plain(rows=9)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_op_repeats_without_python_what_python_would_launch(name, entered):
    spec, registers, tensors_of, call = CASES[name]
    op = getattr(OPS, name.split()[0])
    in_c, in_python = (make(driver, spec, registers) for driver in (NativeFakeDriver, FakeDriver))
    kept = [tensors_of() for _ in range(3)]
    results = [call(op, in_c[1].handle, tensors) for tensors in kept]
    assert len(entered) == 1, "only the first call is checked"
    del entered[:]
    expected = [call(op, in_python[1].handle, tensors) for tensors in kept]
    assert len(entered) == 3
    for got, want in zip(results, expected, strict=True):
        for mine, theirs in zip(_tuple(got), _tuple(want), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    found, wanted = in_c[0].launches, in_python[0].launches
    assert [record.config for record in found] == [record.config for record in wanted]
    plans = {plan.symbol: plan for plan in in_c[1]._on(0).plans}
    for mine, theirs in zip(found, wanted, strict=True):
        assert _settled(mine, plans) == _settled(theirs, plans)
    assert len({record.block for record in found}) >= 3


# Members that are addresses of what a call makes or a plan holds, and so differ from call to call.
_OWN = (
    "out", "lse", "lse_accum", "o_accum", "raw", "counts", "codes", "scales", "histograms", "counters", "lists",
    "block_scores", "block_counts",
)  # fmt: skip


def _settled(record, plans):
    block = bytearray(record.block)
    # The scores of topk are an argument.
    own = (*_OWN, "scores") if plans[record.symbol].variant.family == "indexer_logits" else _OWN
    for field in plans[record.symbol].params:
        if field.ctype == "pointer" and field.name in own:
            block[field.offset_bytes : field.offset_bytes + 8] = bytes(8)
    return record.symbol, bytes(block)


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("driver_type", [NativeFakeDriver, FakeDriver])
@pytest.mark.parametrize("name", CASES)
def test_a_tangent_is_refused_rather_than_lost(name, driver_type):
    spec, registers, tensors_of, call = CASES[name]
    op = getattr(OPS, name.split()[0])
    driver, kernels = make(driver_type, spec, registers)
    tensors = tensors_of()
    places = [key for key, tensor in tensors.items() if tensor.dtype in (torch.float32, torch.bfloat16)]
    with torch.autograd.forward_ad.dual_level():
        # Kernels are loaded and calls known, and a call without a tangent passes.
        for _ in range(2):
            call(op, kernels.handle, tensors)
        count = len(driver.launches)
        for key in places:
            dual = torch.autograd.forward_ad.make_dual(tensors[key], torch.ones_like(tensors[key]))
            with pytest.raises(GuardError, match=rf"\[T-02\] {key}: has a forward-mode tangent"):
                call(op, kernels.handle, tensors | {key: dual})
    assert len(driver.launches) == count


def test_torch_tells_of_levels_of_forward_mode():
    assert torch.autograd.forward_ad._current_level == -1
    with torch.autograd.forward_ad.dual_level():
        assert torch.autograd.forward_ad._current_level == 0


def test_every_op_has_an_entrance():
    # A step is the calls of its stages, each of which the launcher knows.
    ops = [op for op in torch_ops.SCHEMAS if not op.startswith("decode_step")]
    assert {base_of(op) for op in ops} == set(OP_CALLS), "give the op an OpCall, or its calls cost Python"
    assert {name.split()[0] for name in CASES} == set(ops)
    _, kernels = make(NativeFakeDriver, DECODE)
    assert kernels._op_tables().keys() == OP_CALLS.keys()


def test_threads_find_plans_while_others_drop_them():
    driver, kernels = make(NativeFakeDriver, DECODE)
    kernels._plans._max_plans = 2
    errors, widths = [], (8, 16, 24, 32)

    def work(width):
        tensors = given("decode", "out", "lse")() | {"indices": ints(BATCH, S_Q, width)}
        try:
            for _ in range(60):
                out, lse = OPS.sparse_decode(**tensors, kernels=kernels.handle)
                assert (out.shape, lse.shape) == ((BATCH, S_Q, HEADS, 512), (BATCH, HEADS, S_Q))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(width,)) for width in widths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(kernels._plans._plans) == 2
    assert sum("main" in record.symbol for record in driver.launches) == 60 * len(widths)


def test_what_the_form_names_otherwise_is_left_to_python(entered):
    _, kernels = make(NativeFakeDriver, TOPK_SPEC, 60)
    scores, blocks = torch.zeros(3, 500), ints(3, 63)
    for _ in range(2):
        OPS.topk(scores, kernels.handle, 64, candidate_blocks=blocks)
    assert entered == ["topk"] * 2
    # The eager call knows it.
    assert kernels._topk_launches.repeat(
        scores, None, None, blocks, *[None] * 6, 64, None, False, "set", True
    ) is not False  # fmt: skip


def test_an_entrance_lets_go_of_kernels_that_are_gone():
    # Those of other tests have handles too.
    gc.collect()
    _, kernels = make(NativeFakeDriver, DECODE)
    tensors = given("decode", "out", "lse")()
    handle, tables = kernels.handle, torch_ops.ENTRANCES._tables["sparse_decode"]
    OPS.sparse_decode(**tensors, kernels=handle)
    (plan,) = kernels._plans._plans.values()
    memory, alive = weakref.ref(plan), weakref.ref(kernels)
    assert handle in tables
    del kernels, plan
    gc.collect()
    assert alive() is None and memory() is None and handle not in tables
    _, other = make(NativeFakeDriver, DECODE)
    assert other.handle == handle and tables[handle] is other._decode_routes.table


def test_kernels_that_check_each_call_have_no_entrance(monkeypatch, entered):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    for spec, registers in ((DECODE, 128), (TOPK_SPEC, 60), (CACHE, 40)):
        _, kernels = make(NativeFakeDriver, spec, registers)
        assert not any(kernels.handle in tables for tables in torch_ops.ENTRANCES._tables.values())
    tensors = given("decode", "out", "lse")()
    _, kernels = make(NativeFakeDriver, DECODE)
    for _ in range(2):
        OPS.sparse_decode(**tensors, kernels=kernels.handle)
    assert len(entered) == 2


def test_calls_without_a_plan_find_theirs_by_stream_and_choice(monkeypatch):
    driver, kernels = make(NativeFakeDriver, DECODE)
    checked = []
    launch = OpLaunches.launch
    monkeypatch.setattr(OpLaunches, "launch", lambda self, *call: (checked.append(self), launch(self, *call))[1])
    tensors = given("decode", "out", "lse")()
    for _ in range(3):
        for stream in (0, 7):
            driver.stream = stream
            kernels.sparse_decode(**tensors)
            OPS.sparse_decode(**tensors, kernels=kernels.handle, num_splits=2)
    assert len(checked) == len(set(checked)) == 4 == len(kernels._plans._plans)
    assert len(kernels._decode_routes.table) == 4
    assert {(record.config.stream, "combine" in record.symbol) for record in driver.launches} >= {(0, True), (7, True)}


def test_a_dropped_plan_is_not_found_again():
    _, kernels = make(NativeFakeDriver, DECODE)
    kernels._plans._max_plans = 2
    tensors = given("decode", "out", "lse")()
    kernels.sparse_decode(**tensors)
    (first,) = kernels._plans._plans.values()
    dropped = weakref.ref(first)
    del first
    for width in (8, 16):
        kernels.sparse_decode(**tensors | {"indices": ints(BATCH, S_Q, width)})
    gc.collect()
    assert dropped() is None, "what a plan holds is to be free again"
    kernels.sparse_decode(**tensors)
    assert len(kernels._plans._plans) == 2


def test_a_captured_call_is_left_to_python_and_pins_its_plan():
    driver, kernels = make(NativeFakeDriver, DECODE)
    tensors = given("decode", "out", "lse")()
    call = [tensors.get(name) for name in DecodeTensors._fields]
    kernels.sparse_decode(**tensors)
    assert kernels._decode_routes.repeat(*call, None, None) is not False
    driver.capturing = True
    assert kernels._decode_routes.repeat(*call, None, None) is False
    OPS.sparse_decode(**tensors, kernels=kernels.handle)
    assert len(kernels._plans._pinned) == 1
    driver.capturing = False
    assert kernels._decode_routes.repeat(*call, None, None) is not False


def test_rows_that_blocks_share_are_repeated_on_their_stream_alone(entered):
    driver, kernels = make(NativeFakeDriver, TOPK_SPEC, 60)
    for stream in (0, 7, 0, 7, 0):
        driver.stream = stream
        OPS.topk(long_scores(), kernels.handle, 64)
    assert len(entered) == 2 == len(kernels._topk_plans._plans) and len(kernels._topk_routes.table) == 2
    # A captured graph keeps the plan of its calls, which others then must not find.
    driver.capturing = True
    OPS.topk(long_scores(), kernels.handle, 64)
    driver.capturing = False
    (taken,) = kernels._topk_plans._taken.values()
    for _ in range(2):
        OPS.topk(long_scores(), kernels.handle, 64)
    assert len(entered) == 4 and taken not in kernels._topk_plans._plans.values()
    bases = [block["histograms"] for block in blocks(kernels, driver)[::2]]
    assert bases[-1] == bases[-2] != bases[-3] == taken.workspace.data_ptr()


def test_a_workspace_is_zeros_again_after_a_refused_launch(entered):
    driver, kernels = make(NativeFakeDriver, TOPK_SPEC, 60)
    OPS.topk(long_scores(), kernels.handle, 64)
    (plan,) = kernels._topk_plans._plans.values()
    driver.launch_error = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(DeviceError):
        OPS.topk(long_scores(), kernels.handle, 64)
    driver.launch_error = ""
    plan.workspace.fill_(1)
    assert len(entered) == 1
    OPS.topk(long_scores(), kernels.handle, 64)
    assert len(entered) == 2 and not plan.workspace.any(), "Python has seen to it"
    OPS.topk(long_scores(), kernels.handle, 64)
    assert len(entered) == 2


def test_a_plan_of_shared_rows_goes_with_its_kernels():
    _, kernels = make(NativeFakeDriver, TOPK_SPEC, 60)
    OPS.topk(long_scores(), kernels.handle, 64)
    (plan,) = kernels._topk_plans._plans.values()
    launches = plan.launches
    memory = weakref.ref(plan)
    kernels._topk_plans._plans.clear()
    kernels._topk_routes.forget()
    del plan
    assert memory() is None, "what its launches know of must not keep it"
    launches._failed()


@pytest.mark.parametrize("missing", [("out", "lse"), ("lse",), ("out",)])
def test_new_outputs_are_as_the_first_ones(missing):
    _, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK), given("decode", *missing)()
    with torch.inference_mode():
        first = kernels.sparse_decode(**tensors, plan=plan)
    results = [kernels.sparse_decode(**tensors, plan=plan) for _ in range(2)]
    assert len(plan._launches) == 1
    for name, index in (("out", 0), ("lse", 1)):
        for result in results:
            got, want = result[index], first[index]
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
            assert type(got) is torch.Tensor and not got.requires_grad and not got.is_inference()
            assert (got is tensors.get(name)) == (name not in missing)
    made = [result[index] for result in results for name, index in (("out", 0), ("lse", 1)) if name in missing]
    storages = {tensor.untyped_storage().data_ptr() for tensor in made}
    assert len(storages) == len(made), "each output has its own storage"
    assert all(tensor.storage_offset() == 0 for tensor in made)


def test_outputs_of_a_mode_are_declined():
    driver, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK), given("decode", "out", "lse")()
    call = [tensors.get(name) for name in DecodeTensors._fields]
    kernels.sparse_decode(**tensors, plan=plan)
    count = len(driver.launches)
    with FakeTensorMode():
        assert plan.repeat(*call, None) is False
        with pytest.raises(GuardError, match=r"^\[T-01\] out: FakeTensor"):
            kernels.sparse_decode(**tensors, plan=plan)
    assert len(driver.launches) == count
    assert plan.repeat(*call, None) is not False


def test_a_call_whose_outputs_cannot_be_described_is_not_remembered(monkeypatch):
    _, kernels = make(NativeFakeDriver, DECODE)
    plan, tensors = kernels.plan_sparse_decode(BATCH, S_Q, TOPK), given("decode", "out", "lse")()

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", no_memory)
        kernels.sparse_decode(**tensors, plan=plan)
    assert len(plan._launches) == 0
    kernels.sparse_decode(**tensors, plan=plan)
    assert len(plan._launches) == 1


def test_nothing_is_kept_of_what_an_entrance_takes(entered):
    _, kernels = make(NativeFakeDriver, DECODE)
    tensors = decode_tensors()
    call = partial(OPS.sparse_decode_out.default, **tensors, kernels=kernels.handle)
    call()
    before = {name: sys.getrefcount(tensor) for name, tensor in tensors.items()}
    table = sys.getrefcount(kernels._decode_routes.table)
    for _ in range(100):
        call()
    assert {name: sys.getrefcount(tensor) for name, tensor in tensors.items()} == before
    after = sys.getrefcount(kernels._decode_routes.table)
    assert after == table and len(entered) == 1


LAUNCH = (1 << 40, 1, 32, 0, False, 1, bytes(8), ((0, 0, 0),))


@pytest.mark.parametrize(
    ("news", "message"),
    [
        (((1, torch.zeros(1)),), "new tensor 0 at place 1"),
        (((0, torch.zeros(1)),), "new tensor 0 at place 0"),
        (((9, torch.zeros(1)),), "new tensor 0 at place 9"),
    ],
)
def test_only_outputs_that_a_call_lacks_are_made(news, message):
    calls = recording_cuda().launcher.calls(3, 0, 0b101, 3, print)
    with pytest.raises(ValueError, match=message):
        calls.remember((ints(1), None, ints(1)), 1, (LAUNCH,), (), lambda: news)
    assert calls.remember((ints(1), None, None), 1, (LAUNCH,), (), lambda: None) is False
    assert len(calls) == 0
    with pytest.raises(ZeroDivisionError):
        calls.remember((ints(1), None, None), 1, (LAUNCH,), (), lambda: 1 // 0)
    assert calls.remember((ints(1), None, None), 1, (LAUNCH,), (), lambda: ((2, ints(1)),)) is True


def test_routes_lead_to_calls_of_their_form():
    launcher = recording_cuda().launcher
    routes, calls = launcher.routes(1, 0, 1, 2), launcher.calls(1, 1, 0, 3, print)
    with pytest.raises(ValueError, match="calls of 1 tensors and 1 scalars: expected 1 and 0"):
        routes.add((ints(1), None), calls, None)
    calls = launcher.calls(1, 0, 0, 3, print)
    with pytest.raises(TypeError, match="a call has 1 tensors and 1 scalars, got 1 values"):
        routes.add((ints(1),), calls, None)
    for number in range(5):
        assert routes.add((ints(1), number), calls, None) is True and len(routes) == number % 2 + 1
    assert routes.add((ints(1), object()), calls, None) is False
    # Another plan for a call makes the others doubtful as well.
    assert routes.add((ints(1), 4), calls, "another") is True and len(routes) == 1
    routes.forget()
    assert len(routes) == 0 and routes.repeat(ints(1), 4) is False


def test_an_entrance_takes_odd_arguments_to_the_function():
    taken = []
    entrance = native.load_module().Entrance(
        {"h": object()}, lambda *a, **k: taken.append((a, k)), (("q", 0), ("kernels", -1), ("other", -2)), (None,), 0
    )
    tensor = ints(HEADS)
    for values, named in (
        ((tensor, "h"), {}),
        ((tensor, "none"), {}),
        ((tensor,), {}),
        ((tensor, "h", 1), {}),
        ((tensor, "h", None, 4), {}),
        ((tensor,), {"kernels": "h", "unknown": 1}),
        ((), {}),
    ):
        entrance(*values, **named)
        assert taken[-1] == (values, named)
    with pytest.raises(TypeError, match="unhashable"):
        entrance(tensor, [])
    with pytest.raises(TypeError, match="no keywords"):
        native.load_module().Entrance(a=1)


@pytest.mark.parametrize(("width", "repeats"), [(512, True), (509, False)])
def test_outputs_whose_rows_lie_apart_are_made_in_python(width, repeats):
    """torch.empty_like would close the gaps, and the strides that were launched with would be wrong."""
    driver, kernels = make(NativeFakeDriver, "v32_indexer_h128", 128)
    q, pool = torch.zeros(2, 1, 64, 128, dtype=torch.uint8), torch.zeros(8, 64, 1, 132, dtype=torch.uint8)
    call = partial(kernels.indexer_logits, q, pool, torch.zeros(2, 64), ints(2), ints(2, 8), max_seq_len=width)
    results = [call() for _ in range(3)]
    assert len(kernels._logits_launches) == repeats
    assert {(result.shape, result.stride()) for result in results} == {((2, width), (512, 1))}
    (plan,) = kernels._on(0).plans
    where = {field.name: field for field in plan.params}
    for record, result in zip(driver.launches, results, strict=True):
        found = [struct.unpack_from(f"<{kind}", record.block, where[name].offset_bytes)[0] for kind, name in (
            ("Q", "scores"), ("q" if where["score_stride"].ctype == "i64" else "i", "score_stride"))]  # fmt: skip
        assert found == [result.data_ptr(), 512]
