"""What reaches the device: argument blocks, grids, PDL, workspace addresses, outputs, streams and graph capture."""

import math
import struct
import threading

import pytest
import torch
from fake_driver import H200, FakeDriver, fake_cubins, unpack

from dsagen.errors import DeviceError, DsagenError, FrozenError, GuardError
from dsagen.runtime.api import Kernels
from dsagen.runtime.blocks import ArgumentBlock
from dsagen.runtime.driver import DeviceFacts
from dsagen.runtime.plan_cache import PlanCache, PlanKey
from dsagen.spec import load_spec

pytestmark = pytest.mark.usefixtures("each_launcher")

PAGES, PAGE, TOPK = 5, 61, 200


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES", "DSAGEN_NO_JIT"):
        monkeypatch.delenv(name, raising=False)


def make(spec="v32_h16", device=H200, **changes):
    driver = FakeDriver(device)
    spec = load_spec(spec)
    return driver, Kernels(spec.replace(**changes) if changes else spec, open_driver=lambda: driver, read=fake_cubins)


def inputs(batch=2, s_q=3, heads=16, topk=TOPK):
    q = torch.randn(batch, s_q, heads, 576).bfloat16()
    k_cache = torch.zeros(PAGES, PAGE, 1, 656, dtype=torch.uint8)
    return q, k_cache, torch.zeros(batch, s_q, topk, dtype=torch.int32)


def blocks(kernels, driver):
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    return [unpack(record.block, plans[record.symbol]) for record in driver.launches]


def test_block_of_an_unsplit_call():
    driver, kernels = make()
    q, k_cache, indices = inputs()
    plan = kernels.plan_sparse_decode(2, 3, TOPK, num_splits=1)
    out, lse = kernels.sparse_decode(q, k_cache, indices, plan=plan)
    (block,) = blocks(kernels, driver)
    assert block.pop("scale_log2") == pytest.approx(kernels.spec.sm_scale / math.log(2), rel=1e-6)
    assert block.pop("lse_unit") == pytest.approx(math.log(2), rel=1e-6)
    multiplier, shift = block.pop("page_multiplier"), block.pop("page_shift")
    assert all(n * multiplier >> (31 + shift) == n // PAGE for n in range(2000))
    assert block == {
        "q": q.data_ptr(),
        "q_stride_b": 3 * 16 * 576,
        "q_stride_s": 16 * 576,
        "q_stride_h": 576,
        "kv": k_cache.data_ptr(),
        "page_stride_bytes": PAGE * 656,
        "row_stride_bytes": 656,
        "page_size": PAGE,
        "pool_tokens": PAGES * PAGE,
        "head_groups": 1,
        "group_heads": 16,
        "topk": TOPK,
        "indices": indices.data_ptr(),
        "indices_stride_b": 3 * TOPK,
        "indices_stride_s": TOPK,
        "topk_length": 0,
        "length_stride_b": 0,
        "length_stride_s": 0,
        "s_q": 3,
        "heads": 16,
        "num_splits": 1,
        "out": out.data_ptr(),
        "out_stride_b": 3 * 16 * 512,
        "out_stride_s": 16 * 512,
        "out_stride_h": 512,
        "lse": lse.data_ptr(),
        "lse_stride_b": 3 * 16,
        "lse_stride_s": 16,
        "lse_stride_h": 1,
        "attn_sink": 0,
        "empty_lse": math.inf,
        "lse_accum": 0,
        "o_accum": 0,
    }
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 3, 16, 512), torch.bfloat16, True)
    assert (lse.shape, lse.dtype, lse.stride()) == ((2, 16, 3), torch.float32, (48, 1, 16))
    (record,) = driver.launches
    main = kernels._on(0).mains[0]
    assert (record.config.grid, record.config.threads) == (6, main.threads)
    assert record.config.smem_bytes == main.smem_bytes
    assert record.config.overlaps_previous
    assert plan.workspace is None and plan.workspace_bytes == 0
    assert plan.main_slug == main.slug


@pytest.mark.parametrize(("body", "begins_early"), [("", True), ("mma_sync", False)])
def test_split_calls_launch_the_combine_behind_the_main_kernel(body, begins_early, monkeypatch):
    monkeypatch.setenv("DSAGEN_SPARSE_DECODE_BODY", body)
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(2, 3, TOPK, num_splits=2)
    out, lse = kernels.sparse_decode(*inputs(), plan=plan)
    main, combine = blocks(kernels, driver)
    configs = [record.config for record in driver.launches]
    assert [config.grid for config in configs] == [2 * 3 * 2, 2 * 3 * 16]
    assert [config.overlaps_previous for config in configs] == [begins_early, True]
    base = plan.workspace.data_ptr()
    assert plan.workspace.numel() == plan.workspace_bytes > 0
    for block in (main, combine):
        assert block["lse_accum"] == base
        assert block["o_accum"] == base + plan.partition.o_accum_offset_bytes
        assert (block["out"], block["lse"], block["num_splits"]) == (out.data_ptr(), lse.data_ptr(), 2)
    kernels.sparse_decode(*inputs(), plan=plan)
    assert blocks(kernels, driver)[2]["o_accum"] == main["o_accum"], "the workspace moved"


def test_combine_does_not_overlap_where_the_arch_cannot():
    driver, kernels = make(device=DeviceFacts("fake A100", (8, 0), 108, 163 * 1024), archs=["sm_80"])
    kernels.sparse_decode(*inputs(), plan=kernels.plan_sparse_decode(2, 3, TOPK, num_splits=2))
    assert [record.config.overlaps_previous for record in driver.launches] == [False, False]


def test_optional_inputs_and_given_outputs():
    driver, kernels = make(lse={"base": 2, "empty": "-inf"})
    q, k_cache, indices = inputs()
    length = torch.zeros(2, 3, 2, dtype=torch.int32)[:, :, 0]
    sink = torch.zeros(16)
    out = torch.zeros(2, 16, 3, 640, dtype=torch.bfloat16).transpose(1, 2)[..., :512]
    lse = torch.zeros(2, 16, 3)
    results = kernels.sparse_decode(
        q, k_cache, indices, topk_length=length, attn_sink=sink, softmax_scale=0.5, out=out, lse=lse
    )
    assert results[0] is out and results[1] is lse
    for block in blocks(kernels, driver):
        assert (block["attn_sink"], block["lse_unit"], block["empty_lse"]) == (sink.data_ptr(), 1.0, -math.inf)
        assert [block[f"out_stride_{d}"] for d in "bsh"] == [16 * 3 * 640, 640, 3 * 640]
        assert [block[f"lse_stride_{d}"] for d in "bhs"] == [48, 3, 1]
    main = blocks(kernels, driver)[0]
    assert (main["topk_length"], main["length_stride_b"], main["length_stride_s"]) == (length.data_ptr(), 6, 2)
    assert main["scale_log2"] == pytest.approx(0.5 / math.log(2), rel=1e-6)


def test_one_length_per_request_has_no_query_stride():
    driver, kernels = make()
    length = torch.zeros(2, dtype=torch.int32)
    kernels.sparse_decode(*inputs(), topk_length=length)
    main = blocks(kernels, driver)[0]
    assert (main["topk_length"], main["length_stride_b"], main["length_stride_s"]) == (length.data_ptr(), 1, 0)


def test_strided_inputs_and_padded_pages():
    driver, kernels = make()
    q = torch.zeros(2, 3, 20, 640, dtype=torch.bfloat16)[:, :, 2:18, 64:]
    pool = torch.zeros(PAGES, PAGE * 656 + 16, dtype=torch.uint8)
    k_cache = pool.as_strided((PAGES, PAGE, 1, 656), (PAGE * 656 + 16, 656, 656, 1))
    indices = torch.zeros(3, 2, 256, dtype=torch.int32).transpose(0, 1)[..., 56:]
    kernels.sparse_decode(q, k_cache, indices)
    main = blocks(kernels, driver)[0]
    assert [main[f"q_stride_{d}"] for d in "bsh"] == [3 * 20 * 640, 20 * 640, 640]
    assert main["q"] == q.data_ptr()
    assert (main["page_stride_bytes"], main["row_stride_bytes"]) == (PAGE * 656 + 16, 656)
    assert (main["indices_stride_b"], main["indices_stride_s"]) == (256, 512)


def test_strides_of_dims_of_one_do_not_matter():
    driver, kernels = make(heads=1)
    q = torch.zeros(4096, dtype=torch.bfloat16).as_strided((1, 1, 1, 576), (3, 5, 7, 1))
    k_cache = torch.zeros(4096, dtype=torch.uint8).as_strided((1, 1, 1, 656), (13, 17, 1, 1))
    out = torch.zeros(4096, dtype=torch.bfloat16).as_strided((1, 1, 1, 512), (1, 1, 3, 1))
    kernels.sparse_decode(q, k_cache, torch.zeros(1, 1, 1, dtype=torch.int32).as_strided((1, 1, 1), (9, 9, 9)), out=out)
    main = blocks(kernels, driver)[0]
    assert [main[f"q_stride_{d}"] for d in "bsh"] == [0, 0, 0]
    assert [main[f"out_stride_{d}"] for d in "bsh"] == [0, 0, 0]
    assert (main["row_stride_bytes"], main["page_stride_bytes"]) == (656, 656)


def test_pages_of_one_token_may_lie_apart():
    driver, kernels = make()
    k_cache = torch.zeros(50, 1, 1, 672, dtype=torch.uint8)[..., :656]
    q, _, indices = inputs()
    kernels.sparse_decode(q, k_cache, indices)
    main = blocks(kernels, driver)[0]
    assert (main["page_size"], main["page_stride_bytes"], main["row_stride_bytes"]) == (1, 672, 656)
    assert (main["page_multiplier"], main["page_shift"]) == (1 << 31, 0)


def test_empty_batches_launch_nothing():
    driver, kernels = make()
    for batch, s_q in ((0, 3), (2, 0)):
        out, lse = kernels.sparse_decode(*inputs(batch, s_q))
        assert (tuple(out.shape), tuple(lse.shape)) == ((batch, s_q, 16, 512), (batch, 16, s_q))
        plan = kernels.plan_sparse_decode(batch, s_q, TOPK)
        kernels.sparse_decode(*inputs(batch, s_q), plan=plan)
    assert driver.launches == []


def test_heads_split_over_groups():
    driver, kernels = make("v32_h128")
    kernels.sparse_decode(*inputs(heads=128), plan=kernels.plan_sparse_decode(2, 3, TOPK, num_splits=1))
    (main,) = blocks(kernels, driver)
    assert main["head_groups"] * main["group_heads"] == 128
    assert driver.launches[0].config.grid == 6 * main["head_groups"]


def test_batch_invariant_spec_gives_every_batch_the_same_splits():
    _, kernels = make(determinism="batch_invariant")
    plans = [kernels.plan_sparse_decode(batch, 1, 2048) for batch in (1, 16, 500)]
    assert len({plan.num_splits for plan in plans}) == 1


def test_workspace_size_is_known_before_anything_is_allocated():
    driver, kernels = make()
    size = kernels.sparse_decode_workspace_bytes(2, 3, TOPK, num_splits=2)
    assert driver.loads == []
    plan = kernels.plan_sparse_decode(2, 3, TOPK, num_splits=2)
    assert size == plan.workspace_bytes > 0
    assert kernels.sparse_decode_workspace_bytes(2, 3, TOPK, num_splits=1) == 0


def aligned_bytes(size, shift=0):
    raw = torch.empty(size + 512, dtype=torch.uint8)
    start = -raw.data_ptr() % 256 + shift
    return raw[start : start + size]


def test_the_callers_workspace_is_used():
    driver, kernels = make()
    workspace = aligned_bytes(kernels.sparse_decode_workspace_bytes(2, 3, TOPK, num_splits=2))
    plan = kernels.plan_sparse_decode(2, 3, TOPK, num_splits=2, workspace=workspace)
    kernels.sparse_decode(*inputs(), plan=plan)
    assert blocks(kernels, driver)[0]["lse_accum"] == workspace.data_ptr()
    assert driver.kept[0] is workspace


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:-1], r"\[SD-23\] workspace: \d+ B"),
        (lambda w: aligned_bytes(w.numel(), 16), r"\[SD-23\] workspace: .* at a multiple of 256 B"),
        (lambda w: w.view(torch.int8), r"\[T-04\] workspace: dtype int8, expected uint8"),
        (lambda w: w[None], r"\[T-05\] workspace: 2 dims"),
        (lambda w: w.numel(), r"\[T-01\] workspace: expected a torch.Tensor, found int"),
    ],
)
def test_an_unfit_workspace_is_refused(change, message):
    _, kernels = make()
    workspace = aligned_bytes(kernels.sparse_decode_workspace_bytes(2, 3, TOPK, num_splits=2))
    with pytest.raises(GuardError, match=message):
        kernels.plan_sparse_decode(2, 3, TOPK, num_splits=2, workspace=change(workspace))


def test_calls_without_a_plan_share_one_per_shape_and_stream():
    driver, kernels = make()
    for stream in (0, 0, 7, 7, 0):
        driver.stream = stream
        kernels.sparse_decode(*inputs(batch=1, s_q=1))
    bases = [block["o_accum"] for block in blocks(kernels, driver)[::2]]
    assert blocks(kernels, driver)[0]["num_splits"] > 1
    assert bases[0] == bases[1] == bases[4] != bases[2] == bases[3]
    assert [record.config.stream for record in driver.launches[::2]] == [0, 0, 7, 7, 0]


def test_a_plan_belongs_to_one_stream():
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(2, 3, TOPK)
    assert plan.stream is None
    driver.stream = 7
    kernels.sparse_decode(*inputs(), plan=plan)
    assert plan.stream == 7
    driver.stream = 8
    with pytest.raises(GuardError, match=r"^\[T-10\] plan: belongs to stream 0x7, the current stream is 0x8: .*rebind"):
        kernels.sparse_decode(*inputs(), plan=plan)
    plan.rebind()
    kernels.sparse_decode(*inputs(), plan=plan)
    assert driver.launches[-1].config.stream == plan.stream == 8


def test_a_plan_serves_its_own_shape_only():
    _, kernels = make()
    plan = kernels.plan_sparse_decode(2, 3, TOPK)
    for shape, message in (
        ({"batch": 1}, "made for batch 2, the tensors have batch 1"),
        ({"s_q": 1}, "made for s_q 3, the tensors have s_q 1"),
        ({"topk": 64}, "made for topk 200, the tensors have topk 64"),
    ):
        with pytest.raises(GuardError, match=rf"^\[T-09\] plan: {message}"):
            kernels.sparse_decode(*inputs(**shape), plan=plan)
    for foreign in (make()[1].plan_sparse_decode(2, 3, TOPK), "plan"):
        with pytest.raises(GuardError, match=r"^\[T-09\] plan: was not made by these kernels"):
            kernels.sparse_decode(*inputs(), plan=foreign)


def test_capture_needs_a_plan_from_before():
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(2, 3, TOPK)
    driver.capturing = True
    kernels.sparse_decode(*inputs(), plan=plan)
    assert driver.launches
    with pytest.raises(FrozenError, match=r"during CUDA graph capture is not possible: call plan_sparse_decode before"):
        kernels.sparse_decode(*inputs(batch=1))
    with pytest.raises(FrozenError, match="capture"):
        kernels.plan_sparse_decode(1, 3, TOPK)


def test_a_shared_plan_that_was_captured_is_kept_for_good():
    driver, kernels = make()
    kernels.sparse_decode(*inputs(topk=2048))
    first = blocks(kernels, driver)[0]["o_accum"]
    driver.capturing = True
    kernels.sparse_decode(*inputs(topk=2048))
    driver.capturing = False
    for topk in range(1, 100):
        kernels.sparse_decode(*inputs(topk=topk))
    driver.launches.clear()
    kernels.sparse_decode(*inputs(topk=2048))
    assert blocks(kernels, driver)[0]["o_accum"] == first != 0


class StandIn:
    def __init__(self, workspace_bytes):
        self.workspace_bytes = workspace_bytes


def test_plan_cache_drops_the_least_recently_used():
    cache = PlanCache(max_plans=2, max_workspace_bytes=100)
    keys = [PlanKey(batch, 1, 1, 0, 0, 0) for batch in range(5)]
    plans = [StandIn(size) for size in (10, 10, 10, 95, 1000)]
    cache.add(keys[0], plans[0])
    cache.add(keys[1], plans[1])
    assert cache.get(keys[0]) is plans[0]
    cache.add(keys[2], plans[2])
    assert [cache.get(key) for key in keys[:3]] == [plans[0], None, plans[2]]
    cache.add(keys[3], plans[3])
    assert [cache.get(key) for key in keys[:4]] == [None, None, None, plans[3]]
    cache.pin(keys[3])
    cache.add(keys[4], plans[4])
    assert [cache.get(key) for key in keys[3:]] == plans[3:]


def test_capture_forbids_the_first_load():
    driver, kernels = make()
    driver.capturing = True
    with pytest.raises(FrozenError, match=r"loading during CUDA graph capture is not possible: call prepare\(\)"):
        kernels.prepare()
    driver.capturing = False
    driver.load_error = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"  # another thread's stream is being captured
    with pytest.raises(FrozenError, match="capture"):
        kernels.prepare()


def test_freeze_turns_a_miss_into_an_error():
    driver, kernels = make()
    kernels.freeze()
    with pytest.raises(FrozenError, match=r"needed but was not loaded on device 0 before freeze\(\): call prepare\(\)"):
        kernels.sparse_decode(*inputs())
    driver, kernels = make()
    kernels.prepare()
    kernels.freeze()
    kernels.sparse_decode(*inputs())
    assert len(driver.loads) == 2 and driver.launches


def test_prepare_loads_everything_once():
    driver, kernels = make()
    kernels.prepare()
    kernels.prepare([0, "cpu"])
    assert sorted(driver.loads) == sorted(plan.symbol for plan in kernels._on(0).plans)
    main = kernels._on(0).mains[0]
    assert driver.smem_opt_ins == {main.symbol: main.smem_bytes}
    # The combine comes between main kernels, which need all of it.
    assert driver.smem_preferred == [kernels._on(0).combine.symbol]


def test_a_refused_launch_names_op_kernel_and_arguments():
    driver, kernels = make()
    driver.launch_error = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(DeviceError) as caught:
        kernels.sparse_decode(*inputs())
    text = str(caught.value)
    assert text.startswith("sparse_decode: sparse_decode-main-hopper-sm_90a")
    assert "CUDA_ERROR_INVALID_VALUE" in text and "topk=200" in text and "DSAGEN_DEBUG_SYNC=1" in text


def test_debug_sync_finds_the_kernel_that_faults(monkeypatch):
    monkeypatch.setenv("DSAGEN_DEBUG_SYNC", "1")
    driver, kernels = make()
    kernels.sparse_decode(*inputs(), plan=kernels.plan_sparse_decode(2, 3, TOPK, num_splits=2))
    assert driver.syncs == 2
    plan = kernels.plan_sparse_decode(2, 3, TOPK, num_splits=1)
    driver.capturing = True
    kernels.sparse_decode(*inputs(), plan=plan)
    assert driver.syncs == 2, "a capture must not be synchronised"
    driver.capturing, driver.sync_error = False, "CUDA_ERROR_ILLEGAL_ADDRESS"
    with pytest.raises(DeviceError, match=r"sparse_decode-main-.*CUDA_ERROR_ILLEGAL_ADDRESS.*pool_tokens=305"):
        kernels.sparse_decode(*inputs(), plan=plan)


def test_threads_sharing_a_plan_keep_main_and_combine_together():
    driver, kernels = make()
    plan = kernels.plan_sparse_decode(2, 3, TOPK, num_splits=2)
    errors = []

    def work():
        tensors = inputs()
        try:
            for _ in range(50):
                out, _ = kernels.sparse_decode(*tensors, plan=plan)
                assert out.shape == (2, 3, 16, 512)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    recorded = blocks(kernels, driver)
    assert len(recorded) == 400
    for main, combine in zip(recorded[::2], recorded[1::2], strict=True):
        assert "q" in main and "q" not in combine
        assert main["out"] == combine["out"]


def test_a_block_says_which_argument_is_missing_or_does_not_fit():
    plan = make()[1]._on(0).combine
    block = ArgumentBlock(plan)
    values = dict.fromkeys(block.names, 0)
    block.write(values)
    assert block.read() == values
    with pytest.raises(DsagenError, match=r"combine.*nothing gives its parameter 'heads'"):
        block.write({name: 0 for name in block.names if name != "heads"})
    with pytest.raises(DsagenError, match="does not fit its parameter"):
        block.write({**values, "heads": 1 << 31})


def test_block_layout_is_the_plans():
    for plan in make()[1]._on(0).plans:
        block = ArgumentBlock(plan)
        block.write({name: index for index, name in enumerate(block.names)})
        found = unpack(bytes(block._memory), plan)
        assert found == {name: index for index, name in enumerate(block.names)}
        assert struct.calcsize(block._layout.struct.format) == plan.params_bytes
