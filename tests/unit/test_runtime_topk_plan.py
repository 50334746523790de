"""Rows of top-k that blocks share: two launches with one workspace, and the plans that hold it."""

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins
from native_driver import NativeFakeDriver
from test_runtime_topk import LONG, ROWS, WIDTH, K, blocks, ints, make
from torch._subclasses.fake_tensor import FakeTensorMode

from dsagen.errors import DeviceError, DsagenError, FrozenError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

pytestmark = pytest.mark.usefixtures("each_launcher")


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES", "DSAGEN_NO_JIT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kernels():
    return make()[1]


def long_scores(rows=ROWS):
    return torch.zeros(rows, LONG)


def test_rows_that_blocks_share_take_two_launches_with_one_workspace():
    driver, kernels = make()
    plan = kernels.plan_topk(ROWS, LONG, K)
    out = kernels.topk(long_scores(), k=K, plan=plan)
    count, select = (kernels._on(0).by_role["topk", role][0] for role in ("count", "select"))
    assert [record.symbol for record in driver.launches] == [count.symbol, select.symbol]
    # 132 SMs give each of 3 rows 44 blocks, and a row of 2 MiB has work for 64.
    assert [record.config.grid for record in driver.launches] == [ROWS * 44] * 2
    assert [record.config.overlaps_previous for record in driver.launches] == [False, True]
    first, second = blocks(kernels, driver)
    assert first == second
    workspace = plan.workspace
    base, end = workspace.data_ptr(), workspace.data_ptr() + workspace.numel()
    assert workspace.numel() == plan.workspace_bytes == kernels.topk_workspace_bytes(ROWS, LONG, K) > 0
    assert not workspace.any()
    assert (first["parts"], first["part_slots"], first["out"]) == (44, K, out.data_ptr())
    assert base == first["histograms"]
    assert first["histograms"] + ROWS * 2048 * 4 <= first["counters"]
    assert first["counters"] + ROWS * 2 * 4 <= first["lists"]
    assert first["lists"] + ROWS * first["list_stride"] * 4 <= end
    assert first["list_stride"] >= max(select.constant("kElements"), 44 * K)


def test_calls_without_a_plan_share_one_for_each_shape_and_stream():
    driver, kernels = make()
    for k in (K, K, K + 1):
        kernels.topk(long_scores(), k=k)
    driver.stream = 7
    kernels.topk(long_scores(), k=K)
    bases = [block["histograms"] for block in blocks(kernels, driver)[::2]]
    assert bases[0] == bases[1] and len(set(bases)) == 3
    assert len(driver.kept) == 3


def test_a_plan_of_rows_that_no_blocks_share_needs_no_workspace():
    driver, kernels = make()
    plan = kernels.plan_topk(ROWS, WIDTH, K)
    assert (plan.workspace, plan.workspace_bytes, kernels.topk_workspace_bytes(ROWS, WIDTH, K)) == (None, 0, 0)
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K, plan=plan)
    driver.stream = 7
    # Without a workspace there is nothing that two streams could share.
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K, plan=plan)
    assert len(driver.launches) == 2 and driver.kept == []


def test_a_plan_belongs_to_the_stream_of_its_first_call():
    driver, kernels = make()
    plan = kernels.plan_topk(ROWS, LONG, K)
    kernels.topk(long_scores(), k=K, plan=plan)
    assert driver.kept == [plan.workspace]
    driver.stream = 7
    with pytest.raises(
        GuardError, match=r"^\[T-10\] plan: belongs to stream 0x0, the current stream is 0x7: make a plan"
    ):
        kernels.topk(long_scores(), k=K, plan=plan)
    assert len(driver.launches) == 2
    plan.rebind()
    kernels.topk(long_scores(), k=K, plan=plan)
    assert [record.config.stream for record in driver.launches] == [0, 0, 7, 7]


def test_a_plan_serves_its_own_shape_only(kernels):
    plan = kernels.plan_topk(ROWS, LONG, K)
    for scores, k, problem in (
        (long_scores(2), K, "rows 3, the call has rows 2"),
        (torch.zeros(ROWS, LONG + 4), K, f"width {LONG}, the call has width {LONG + 4}"),
        (long_scores(), K - 1, f"k {K}, the call has k {K - 1}"),
    ):
        with pytest.raises(GuardError, match=rf"^\[T-09\] plan: made for {problem}: make a plan for it with plan_topk"):
            kernels.topk(scores, k=k, plan=plan)
    with pytest.raises(GuardError, match=r"^\[T-09\] plan: made for device meta, the call has device cpu: "):
        plan.device = torch.device("meta")
        kernels.topk(long_scores(), k=K, plan=plan)


def test_a_plan_serves_the_kernels_that_made_it_only(kernels):
    for foreign in (make()[1].plan_topk(ROWS, LONG, K), "plan", make(ops=["sparse_decode"])[1]):
        with pytest.raises(
            GuardError, match=r"^\[T-09\] plan: was not made by these kernels: pass what their plan_topk"
        ):
            kernels.topk(long_scores(), k=K, plan=foreign)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_plan_is_neither_copied_nor_pickled(kernels, duplicate):
    with pytest.raises(
        DsagenError, match=r"a TopkPlan .* is neither copied nor pickled: make another one with plan_topk"
    ):
        duplicate(kernels.plan_topk(ROWS, LONG, K))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w[:-1],
            r"\[TK-17\] workspace: \d+ B at 0x[0-9a-f]+, the plan needs \d+ B at a multiple of 16: pass what",
        ),
        (lambda w: torch.zeros(len(w) + 16, dtype=torch.uint8)[1:], r"\[TK-17\] workspace: "),
        (lambda w: w.view(torch.int32), r"\[T-04\] workspace: dtype int32, expected uint8 for \[bytes\]"),
        (lambda w: w.view(-1, 16), r"\[T-05\] workspace: 2 dims"),
        (lambda w: w.to("meta"), r"\[T-03\] workspace: on meta, the plan is on cpu: move it with"),
        (lambda w: w.tolist()[:2], r"\[T-01\] workspace: expected a torch.Tensor, found list"),
        (lambda w: w.to_sparse(), r"\[T-14\] workspace: has the layout sparse_coo"),
    ],
    ids=["small", "misaligned", "dtype", "dims", "device", "type", "layout"],
)
def test_a_lent_workspace_must_fit(kernels, change, message):
    workspace = torch.zeros(kernels.topk_workspace_bytes(ROWS, LONG, K), dtype=torch.uint8)
    assert workspace.data_ptr() % 16 == 0
    with pytest.raises(GuardError, match="^" + message):
        kernels.plan_topk(ROWS, LONG, K, workspace=change(workspace))


def test_a_lent_workspace_is_cleared_and_used():
    driver, kernels = make()
    size = kernels.topk_workspace_bytes(ROWS, LONG, K)
    buffer = torch.full((size + 64,), 0xFF, dtype=torch.uint8)
    plan = kernels.plan_topk(ROWS, LONG, K, workspace=buffer[16:])
    assert plan.workspace.data_ptr() == buffer.data_ptr() + 16 and plan.workspace.numel() == size
    assert not buffer[16 : 16 + size].any() and buffer[:16].all() and buffer[16 + size :].all()
    kernels.topk(long_scores(), k=K, plan=plan)
    assert {block["histograms"] for block in blocks(kernels, driver)} == {buffer.data_ptr() + 16}


@pytest.mark.parametrize("name", ["scores", "lengths", "out", "raw"])
def test_a_tensor_inside_the_lent_workspace_is_refused(name):
    driver, kernels = make()
    size = kernels.topk_workspace_bytes(ROWS, LONG, K)
    buffer = torch.zeros(-(-size // 16) * 16 + ROWS * LONG * 4, dtype=torch.uint8)
    plan = kernels.plan_topk(ROWS, LONG, K, workspace=buffer)
    dtype, shape = {
        "scores": (torch.float32, (ROWS, LONG)),
        "lengths": (torch.int32, (ROWS,)),
        "out": (torch.int32, (ROWS, K)),
        "raw": (torch.int32, (ROWS, K)),
    }[name]

    def call(start):
        memory = buffer[start : start + 4 * torch.Size(shape).numel()].view(dtype).view(shape)
        given = {"scores": long_scores(), name: memory}
        kernels.topk(given.pop("scores"), k=K, plan=plan, **given)

    with pytest.raises(GuardError) as caught:
        call(size - 4)
    assert str(caught.value) == (
        f"[T-08] workspace: its memory overlaps that of {name}: pass one that serves nothing else"
    )
    assert driver.launches == []
    # Bytes of the buffer that the plan does not use are the caller's.
    call(-(-size // 16) * 16)
    assert len(driver.launches) == 2


def test_a_workspace_that_cannot_be_had(kernels, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")

    size = kernels.topk_workspace_bytes(ROWS, LONG, K)
    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(DeviceError) as caught:
        kernels.plan_topk(ROWS, LONG, K)
    text = f"workspace: {size} B cannot be had on cpu: pass fewer rows or shorter ones (CUDA out of memory.)"
    assert str(caught.value) == text


def test_no_workspace_is_kept_that_is_memory_in_name_only():
    driver, kernels = make()
    scores, out = long_scores(), ints(ROWS, K)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(GuardError, match=r"^\[T-01\] workspace: FakeTensor is a tensor subclass"):
            kernels.plan_topk(ROWS, LONG, K)
        with pytest.raises(GuardError, match=r"^\[T-01\] workspace: FakeTensor is a tensor subclass"):
            kernels.topk(scores, k=K, out=out)
    assert driver.launches == []
    kernels.topk(scores, k=K, out=out)
    assert blocks(kernels, driver)[0]["histograms"] != 0


def test_capture_needs_a_plan_of_rows_that_blocks_share():
    driver, kernels = make()
    kernels.prepare()
    plan = kernels.plan_topk(ROWS, LONG, K)
    driver.capturing = True
    text = (
        r"^topk: no plan for 3 rows of 524288 and k 64 exists, and making one during CUDA graph capture is not possible"
    )
    with pytest.raises(FrozenError, match=text):
        kernels.topk(long_scores(), k=K)
    with pytest.raises(FrozenError, match=text):
        kernels.plan_topk(ROWS, LONG, K)
    kernels.topk(long_scores(), k=K, plan=plan)
    assert len(driver.launches) == 2
    # A call of that shape on that stream before the capture has left one that others may use.
    driver.capturing = False
    kernels.topk(long_scores(), k=K)
    driver.capturing = True
    kernels.topk(long_scores(), k=K)
    assert len(driver.launches) == 6


def test_frozen_kernels_still_make_plans_but_load_nothing():
    driver, kernels = make()
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K)
    kernels.freeze()
    plan = kernels.plan_topk(ROWS, LONG, K)
    with pytest.raises(FrozenError):
        kernels.topk(long_scores(), k=K, plan=plan)
    # Neither of the two has run, so the workspace is as it was.
    assert len(driver.launches) == 1
    kernels.topk(torch.zeros(ROWS, WIDTH), k=K)
    assert len(driver.launches) == 2


def test_two_threads_do_not_come_between_launches_that_share_a_workspace():
    driver, kernels = make()
    plan, scores = kernels.plan_topk(ROWS, LONG, K), long_scores()
    kernels.topk(scores, k=K, plan=plan)
    del driver.launches[:]
    if isinstance(driver, NativeFakeDriver):
        driver.cuda.set("stub_delay_us", 2000)
    make_launch = driver.make_launch

    def slow(*arguments):
        run = make_launch(*arguments)

        def wait_and_run(operands):
            time.sleep(0.002)  # lets the other threads come
            run(operands)

        return wait_and_run

    driver.make_launch = slow
    plan.launches._launches.clear()
    outs = [ints(ROWS, K) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda out: kernels.topk(scores, k=K, plan=plan, out=out), outs))
    symbols = [record.symbol for record in driver.launches]
    count, select = (kernels._on(0).by_role["topk", role][0].symbol for role in ("count", "select"))
    assert symbols == [count, select] * 8
    destinations = [block["out"] for block in blocks(kernels, driver)]
    assert destinations[::2] == destinations[1::2] and set(destinations) == {out.data_ptr() for out in outs}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((ROWS, LONG, 2049), r"^\[TK-04\] k: 2049, the spec declares a capacity of 2048"),
        ((ROWS, 2**31, K), r"^\[TK-06\] width: rows of 2147483648 are outside 0"),
        ((ROWS, -1, K), r"^\[TK-06\] width: rows of -1 are outside 0"),
        ((-1, LONG, K), r"^\[TK-05\] rows: -1 rows are outside 0"),
        ((2.0, LONG, K), r"^\[T-12\] rows: expected a whole number, found 2.0 \(float\)"),
        ((ROWS, "9", K), r"^\[T-12\] width: expected a whole number, found '9' \(str\)"),
        ((ROWS, LONG, True), r"^\[T-12\] k: expected a whole number, found True \(bool\)"),
    ],
)
def test_a_plan_of_sizes_that_do_not_fit_is_refused(kernels, sizes, message):
    for make_plan in (kernels.plan_topk, kernels.topk_workspace_bytes):
        with pytest.raises(GuardError, match=message):
            make_plan(*sizes)


def test_a_call_that_ends_midway_leaves_no_trace_in_the_next(monkeypatch):
    _, kernels = make()
    plan = kernels.plan_topk(ROWS, LONG, K)
    launch = plan.launches.launch

    def interrupted(*_):
        plan.workspace.fill_(7)
        raise KeyboardInterrupt

    monkeypatch.setattr(plan.launches, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels.topk(long_scores(), k=K, plan=plan)
    monkeypatch.setattr(plan.launches, "launch", launch)
    kernels.topk(long_scores(), k=K, plan=plan)
    assert not plan.workspace.any()


def test_the_calls_of_a_captured_graph_keep_the_shared_plan_for_themselves():
    driver, kernels = make()
    kernels.topk(long_scores(), k=K)
    driver.capturing = True
    # Two layers of one graph follow each other.
    kernels.topk(long_scores(), k=K)
    kernels.topk(long_scores(), k=K)
    driver.capture += 1
    with pytest.raises(FrozenError, match="call plan_topk before the capture"):
        kernels.topk(long_scores(), k=K)
    driver.capturing = False
    kernels.topk(long_scores(), k=K)
    eager, _, first, _, second, _, later, _ = [block["histograms"] for block in blocks(kernels, driver)]
    assert eager == first == second != later


@pytest.mark.parametrize("sizes", [(-1, LONG, K), (ROWS, -1, K)])
def test_negative_sizes_are_refused(kernels, sizes):
    for call in (kernels.plan_topk, kernels.topk_workspace_bytes):
        with pytest.raises(GuardError, match=r"^\[TK-0[56]\] .* outside 0\.\.2147483647"):
            call(*sizes)


def test_plans_are_of_the_declared_op():
    decode = Kernels(load_spec("v32_h16"), open_driver=FakeDriver, read=fake_cubins)
    for make_plan in (decode.plan_topk, decode.topk_workspace_bytes):
        with pytest.raises(GuardError, match=r"^\[T-11\] topk: the spec v32_h16 declares ops sparse_decode"):
            make_plan(1, LONG, K)
