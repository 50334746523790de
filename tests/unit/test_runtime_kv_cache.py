"""The cache ops through the runtime: argument blocks, and every argument that does not fit."""

from dataclasses import replace

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack

from dsagen.check.cache import allocate_cache
from dsagen.errors import DeviceError, FrozenError, GuardError
from dsagen.kv_format import kv_format
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

pytestmark = pytest.mark.usefixtures("each_launcher")

ROWS, PAGES, PAGE = 6, 3, 5
SPEC = {"model": "v41", "heads": 16, "archs": ["sm_90a"], "ops": ["kv_cache"]}
SPLIT = {"model": "custom", "kv": "bf16_split", "topk": 64, "heads": 16, "archs": ["sm_90a"], "ops": ["kv_cache"]}


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES", "DSAGEN_NO_JIT"):
        monkeypatch.delenv(name, raising=False)


def make(**changes):
    driver = FakeDriver(attributes_of=replace(GOOD, registers=40))
    return driver, Kernels(load_spec({**SPEC, **changes}), open_driver=lambda: driver, read=fake_cubins)


@pytest.fixture
def kernels():
    return make()[1]


def block_of(kernels, driver):
    (record,) = driver.launches
    plans = {plan.symbol: plan for plan in kernels._on(0).plans}
    return plans[record.symbol], record, unpack(record.block, plans[record.symbol])


def pool(format_id="v41_interleaved", pages=PAGES, page_size=PAGE, extra_bytes=0):
    return allocate_cache(kv_format(format_id), pages, page_size, "cpu", extra_bytes)


def cache(*args, **options):
    (tensor,) = pool(*args, **options).values()
    return tensor


def off_by_8():
    """A pool that begins 8 B behind a multiple of 16."""
    raw = torch.zeros(PAGES * PAGE * 528 + 32, dtype=torch.uint8)
    first = 8 - raw.data_ptr() % 16
    return raw[first % 16 :][: PAGES * PAGE * 528].view(PAGES, PAGE, 1, 528)


def rows(width=512, count=ROWS, dtype=torch.bfloat16):
    return torch.zeros(count, width, dtype=dtype)


def slots(count=ROWS, dtype=torch.int64):
    return torch.arange(count, dtype=dtype)


def test_block_of_a_write():
    driver, kernels = make()
    x, k_cache, index = rows(), cache(extra_bytes=32), slots()
    assert kernels.kv_write(x, k_cache, index) is None
    plan, record, block = block_of(kernels, driver)
    assert plan.variant.kernel == "write" and plan.variant.axis("kv") == "v41_interleaved"
    assert (record.config.grid, record.config.threads, record.config.smem_bytes) == (2, 128, 0)
    multiplier, shift = block.pop("page_multiplier"), block.pop("page_shift")
    assert all(n * multiplier >> (31 + shift) == n // PAGE for n in range(100))
    assert block == {
        "rows": x.data_ptr(), "row_stride": 512, "k_pe": 0, "k_pe_stride": 0,
        "slots": index.data_ptr(), "slots_wide": 1, "rows_count": ROWS,
        "cache": k_cache.data_ptr(), "page_stride_bytes": 5 * 528 + 32, "rope_cache": 0, "rope_page_stride_bytes": 0,
        "pool_tokens": PAGES * PAGE, "page_size": PAGE,
    }  # fmt: skip


def test_block_of_a_write_with_rotary_dims_apart_to_the_second_cache():
    driver, kernels = make(kv_write={"rows": "fp32"})
    wide = torch.zeros(ROWS, 640)
    x, k_pe, index = wide[:, :448], wide[:, 512:576], slots(dtype=torch.int32)
    k_cache = cache("v41_fp4_interleaved")
    kernels.kv_write(x, k_cache, index, k_pe=k_pe, extra=True)
    plan, _, block = block_of(kernels, driver)
    assert dict(plan.variant.axes) == {"kv": "v41_fp4_interleaved", "rule": "e4m3_scale_floor", "rows": "fp32"}
    assert (block["rows"], block["row_stride"]) == (x.data_ptr(), 640)
    assert (block["k_pe"], block["k_pe_stride"], block["slots_wide"]) == (k_pe.data_ptr(), 640, 0)
    assert block["cache"] == k_cache.data_ptr()


def test_block_of_a_write_to_two_tensors():
    driver, kernels = make(**SPLIT)
    pools = pool("bf16_split", extra_bytes=64)
    kernels.kv_write(rows(576), pools["ckv_cache"], slots(), kpe_cache=pools["kpe_cache"])
    _, _, block = block_of(kernels, driver)
    assert (block["cache"], block["page_stride_bytes"]) == (pools["ckv_cache"].data_ptr(), 5 * 1024 + 64)
    assert (block["rope_cache"], block["rope_page_stride_bytes"]) == (pools["kpe_cache"].data_ptr(), 5 * 128 + 64)


def test_block_of_a_read_by_slots():
    driver, kernels = make()
    k_cache, index = cache(), slots(dtype=torch.int32)
    wide = torch.zeros(ROWS, 520, dtype=torch.bfloat16)
    out = kernels.kv_read(k_cache, slots=index, out=wide[:, 8:])
    plan, record, block = block_of(kernels, driver)
    assert (plan.variant.kernel, record.config.grid) == ("read", 2)
    assert out.data_ptr() == wide.data_ptr() + 16 == block["out"] and block["out_stride"] == 520
    assert (block["slots"], block["slots_wide"], block["block_table"]) == (index.data_ptr(), 0, 0)
    assert (block["rows_count"], block["requests"]) == (ROWS, 0)


def test_block_of_a_read_by_a_block_table():
    driver, kernels = make()
    table = torch.zeros(2, 9, dtype=torch.int32)[:, :4]
    starts, first = torch.tensor([0, 4, 7], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    out = kernels.kv_read(cache(), block_table=table, row_starts=starts, token_starts=first, rows=7)
    _, _, block = block_of(kernels, driver)
    assert (out.shape, out.dtype) == ((7, 512), torch.bfloat16)
    assert (block["slots"], block["block_table"], block["table_stride"]) == (0, table.data_ptr(), 9)
    assert (block["table_columns"], block["requests"], block["rows_count"]) == (4, 2, 7)
    assert (block["row_starts"], block["token_starts"]) == (starts.data_ptr(), first.data_ptr())


def test_block_of_a_conversion():
    driver, kernels = make()
    source, target = cache("v41_page_split", 5, 3), cache(extra_bytes=16)
    kernels.kv_convert(source, target)
    plan, record, block = block_of(kernels, driver)
    assert dict(plan.variant.axes) == {"from": "v41_page_split", "to": "v41_interleaved"}
    assert (record.config.grid, block["rows_count"]) == (4, 15)
    assert (block["source"], block["source_stride_bytes"]) == (source.data_ptr(), source.stride(0))
    assert (block["target"], block["target_stride_bytes"]) == (target.data_ptr(), 5 * 528 + 16)
    assert (block["source_tokens"], block["source_page_size"], block["target_page_size"]) == (15, 3, 5)
    assert (block["source_slots"], block["target_slots"]) == (0, 0)
    driver.launches.clear()
    kernels.kv_convert(source, target, source_slots=slots(2, torch.int32), target_slots=slots(2))
    _, _, block = block_of(kernels, driver)
    assert (block["rows_count"], block["source_wide"], block["target_wide"]) == (2, 0, 1)
    assert block["source_slots"] and block["target_slots"]


def test_no_rows():
    driver, kernels = make()
    kernels.kv_write(rows(count=0), cache(), slots(0))
    assert kernels.kv_read(cache(), slots=slots(0)).shape == (0, 512)
    kernels.kv_convert(cache("v41_page_split"), cache(), source_slots=slots(0), target_slots=slots(0))
    assert driver.launches == []


def test_strides_of_single_rows_pages_and_tokens_do_not_matter():
    driver, kernels = make()
    k_cache = cache(pages=1, page_size=1).as_strided((1, 1, 1, 528), (7, 3, 1, 1))
    kernels.kv_write(rows(count=1).as_strided((1, 512), (7, 1)), k_cache, slots(1))
    _, _, block = block_of(kernels, driver)
    assert (block["row_stride"], block["page_stride_bytes"], block["pool_tokens"]) == (0, 528, 1)


OFF = torch.zeros(ROWS, 520, dtype=torch.bfloat16)
WRITE = {"rows": rows(), "k_cache": cache(), "slots": slots()}
WRONG_WRITES = [
    ({"rows": [1.0]}, "[T-01] rows: expected a torch.Tensor, found list"),
    ({"slots": None}, "[T-01] slots: expected a torch.Tensor, found NoneType"),
    ({"rows": rows().requires_grad_()}, "[T-02] rows: requires grad"),
    ({"rows": rows().to("meta")}, "[T-03] rows: on meta, expected a CUDA device"),
    ({"slots": slots().to("meta")}, "[T-03] slots: on meta, rows is on cpu"),
    ({"rows": rows(dtype=torch.float32)}, "[T-04] rows: dtype float32, expected bfloat16 for [rows, d_qk]"),
    ({"rows": rows(576)}, "[T-06] rows: shape (6, 576), expected [rows, d_qk] = (*, 512)"),
    ({"rows": rows()[0]}, "[T-05] rows: 1 dims (512,), expected 2"),
    ({"rows": OFF[:, 4:516]}, "[KV-13] rows: address 0x"),
    ({"rows": torch.zeros(ROWS, 516, dtype=torch.bfloat16)[:, :512]}, "[KV-08] rows: row stride 1032 B"),
    ({"slots": slots().int()[:5]}, "[T-06] slots: shape (5,), expected [rows] = (6,)"),
    ({"slots": slots().float()}, "[T-04] slots: dtype float32, expected int32 or int64 for [rows]"),
    ({"slots": slots(2 * ROWS)[::2]}, "[T-07] slots: last dim has stride 2"),
    ({"k_pe": torch.zeros(ROWS, 64, dtype=torch.bfloat16)}, "[T-06] rows: shape (6, 512), expected [rows, d_nope]"),
    ({"rows": rows(448), "k_pe": rows(63)}, "[T-06] k_pe: shape (6, 63), expected [rows, d_rope] = (6, 64)"),
    ({"rows": rows(448), "k_pe": OFF[:, 4:68]}, "[KV-13] k_pe: address 0x"),
    ({"k_cache": cache("v41_fp4_interleaved")}, "[T-0"),
    ({"k_cache": cache()[:, :, 0]}, "[T-05] k_cache: 3 dims"),
    ({"k_cache": cache()[:, :4]}, None),
    ({"k_cache": cache(extra_bytes=8)}, "[KV-06] k_cache: page stride 2648 B"),
    ({"k_cache": off_by_8()}, "[KV-12] k_cache: base address 0x"),
    ({"k_cache": cache().expand(-1, -1, 4, -1)}, "[T-06] k_cache: 4 KV heads, expected 1: "),
    ({"k_cache": cache()[:0]}, "[KV-04] k_cache: 0 pages of 5 tokens"),
    ({"k_cache": cache()[:1].expand(3, 5, 1, 528)}, "[KV-07] k_cache: row stride 528 B and page stride 0 B do not"),
    ({"k_cache": cache()[:, ::2]}, "[KV-07] k_cache: row stride 1056 B"),
    ({"kpe_cache": cache()}, "[T-17] kpe_cache: format v41_interleaved has one tensor: leave it out"),
    ({"extra": 1}, "[T-12] extra: expected True or False, found 1 (int)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG_WRITES, ids=[str(message)[:40] for _, message in WRONG_WRITES])
def test_a_write_that_does_not_fit_is_named(kernels, changes, message):
    if message is None:
        kernels.kv_write(**{**WRITE, **changes})  # shorter pages at the same stride are pages
        return
    with pytest.raises(GuardError) as caught:
        kernels.kv_write(**{**WRITE, **changes})
    assert str(caught.value).startswith(message)


TABLE = torch.zeros(2, 4, dtype=torch.int32)
STARTS = torch.tensor([0, 4, 7], dtype=torch.int32)
WRONG_READS = [
    ({}, "[T-17] kv_read: pass slots, or block_table with row_starts and rows"),
    ({"block_table": TABLE, "rows": 7}, "[T-17] kv_read: pass slots, or block_table with row_starts and rows"),
    ({"slots": slots(), "rows": 6}, "[T-17] slots: given with block_table, row_starts, token_starts or rows:"),
    ({"slots": slots(), "token_starts": STARTS}, "[T-17] slots: given with block_table"),
    ({"block_table": TABLE, "row_starts": STARTS, "rows": -1}, "[T-17] rows: -1 is negative: pass how many rows"),
    ({"block_table": TABLE, "row_starts": STARTS, "rows": 7.0}, "[T-12] rows: expected a whole number, found 7.0"),
    ({"block_table": TABLE, "row_starts": STARTS[:2], "rows": 7}, "[T-06] row_starts: shape (2,), expected"),
    ({"block_table": TABLE.long(), "row_starts": STARTS, "rows": 7}, "[T-04] block_table: dtype int64, expected int32"),
    ({"block_table": TABLE, "row_starts": STARTS, "token_starts": STARTS, "rows": 7}, "[T-06] token_starts: "),
    ({"block_table": TABLE, "row_starts": STARTS, "rows": 2**31}, "[KV-03] rows: 2147483648 rows exceed"),
    ({"slots": slots(), "out": rows(dtype=torch.float32)}, "[T-04] out: dtype float32, expected bfloat16"),
    ({"slots": slots(), "out": rows(count=5)}, "[T-06] out: shape (5, 512), expected [rows, d_qk] = (6, 512)"),
    ({"slots": slots(), "out": rows(count=1).expand(6, 512)}, "[T-08] out: strides (0, 1) of shape (6, 512) let"),
    ({"slots": slots(), "out": OFF[:, 4:516]}, "[KV-13] out: address 0x"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG_READS, ids=[message[:40] for _, message in WRONG_READS])
def test_a_read_that_does_not_fit_is_named(kernels, changes, message):
    with pytest.raises(GuardError) as caught:
        kernels.kv_read(cache(), **changes)
    assert str(caught.value).startswith(message)


def test_a_conversion_that_does_not_fit_is_named(kernels):
    source, target = cache("v41_page_split"), cache()
    for options, message in (
        ({"source_slots": slots()}, "[T-17] source_slots, target_slots: one without the other: pass both, or neither"),
        ({"source_slots": slots(), "target_slots": slots(5)}, "[T-06] target_slots: shape (5,)"),
        ({"target": target[:2]}, "[T-17] target: its 10 tokens do not hold the source's 15: pass slots, or a larger"),
        ({"target": source}, "[T-08] target: its memory overlaps that of source"),
        ({"source": cache("v41_fp4_page_split")}, "[T-0"),
    ):
        with pytest.raises(GuardError) as caught:
            kernels.kv_convert(**{"source": source, "target": target, **options})
        assert str(caught.value).startswith(message)
    _, v32 = make(model="v32")
    with pytest.raises(
        GuardError, match=r"^\[T-17\] kv_convert: format v32 has one layout: there is nothing to convert"
    ):
        v32.kv_convert(source, target)


def test_what_a_format_does_not_have_is_named():
    _, v32 = make(model="v32")
    with pytest.raises(GuardError, match=r"^\[T-17\] extra: the spec v32_h16 declares no second cache: leave it out"):
        v32.kv_write(rows(576), cache("v32"), slots(), extra=True)
    _, nope = make(model="glm5_nope")
    with pytest.raises(GuardError, match=r"^\[T-17\] k_pe: format v32_nope has no rotary dims of its own: pass whole"):
        nope.kv_write(rows(), cache("v32_nope"), slots(), k_pe=rows(64))
    _, split = make(**SPLIT)
    pools = pool("bf16_split")
    with pytest.raises(
        GuardError, match=r"^\[T-17\] kpe_cache: format bf16_split keeps rotary dims in their own tensor"
    ):
        split.kv_write(rows(576), pools["ckv_cache"], slots())
    with pytest.raises(GuardError, match=r"^\[KV-10\] kpe_cache: 2 pages of 5 tokens, k_cache has 3 of 5"):
        split.kv_write(rows(576), pools["ckv_cache"], slots(), kpe_cache=pools["kpe_cache"][:2])


def test_outputs_share_no_memory_with_inputs(kernels):
    k_cache = cache()
    flat = torch.empty(0, dtype=torch.uint8).set_(k_cache.untyped_storage())
    x = flat[: 3 * 1024].view(torch.bfloat16).view(3, 512)
    with pytest.raises(GuardError, match=r"^\[T-08\] k_cache: its memory overlaps that of rows"):
        kernels.kv_write(x, k_cache, slots(3))
    with pytest.raises(GuardError, match=r"^\[T-08\] out: its memory overlaps that of k_cache"):
        kernels.kv_read(k_cache, slots=slots(3), out=x)


def test_the_op_needs_to_be_declared(kernels):
    with pytest.raises(GuardError, match=r"^\[T-11\] topk: the spec v41_h16 declares ops kv_cache: add it there"):
        kernels.topk(torch.zeros(1, 8), k=1)
    decode = Kernels(load_spec("v32_h16"), open_driver=FakeDriver, read=fake_cubins)
    for call in (
        lambda k: k.kv_write(**WRITE),
        lambda k: k.kv_read(cache(), slots=slots()),
        lambda k: k.kv_convert(1, 2),
    ):
        with pytest.raises(GuardError, match=r"^\[T-11\] kv_cache: the spec v32_h16 declares ops sparse_decode"):
            call(decode)


def test_slots_past_the_pool_are_an_error_when_asked_for(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    good = torch.tensor([-5, 0, 14, -1, 3, 4])
    bad = torch.tensor([-5, 0, 15, -1, 2**40, 4])
    kernels.kv_write(rows(), cache(), good)
    text = r"^\[KV-11\] {}\[2\] = 15: the pool holds 15 tokens, so slots are below 15, .* \(2 past it\)"
    with pytest.raises(GuardError, match=text.format("slots")):
        kernels.kv_write(rows(), cache(), bad)
    with pytest.raises(GuardError, match=text.format("slots")):
        kernels.kv_read(cache(), slots=bad)
    with pytest.raises(GuardError, match=text.format("target_slots")):
        kernels.kv_convert(cache("v41_page_split"), cache(), source_slots=good, target_slots=bad)
    driver.capturing = True
    with pytest.raises(GuardError, match=r"^\[T-13\] DSAGEN_CHECK_INDICES"):
        kernels.kv_read(cache(), slots=good)


def test_capture_needs_loaded_kernels():
    driver, kernels = make()
    driver.capturing = True
    with pytest.raises(FrozenError, match="during CUDA graph capture is not possible"):
        kernels.kv_write(**WRITE)
    driver.capturing = False
    kernels.prepare()
    kernels.freeze()
    driver.capturing = True
    kernels.kv_write(**WRITE)
    kernels.kv_read(cache(), slots=slots())
    assert len(driver.launches) == 2 and len(driver.loads) == 6


def test_a_failing_launch_names_op_and_kernel():
    driver, kernels = make()
    driver.launch_error = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(DeviceError, match=r"^kv_cache: kv_cache-write-warp_rows-sm_90a-.* failed on device 0: "):
        kernels.kv_write(**WRITE)


def test_explain_tells_kernels_grid_and_floor(kernels):
    text = kernels.explain("kv_cache", batch=100, s_q=2)
    assert text.startswith("kv_cache: v41_h16 on device 0 (fake H200, sm_90a, 132 SMs)\nshape: 200 rows\n")
    assert "[KV-03] rows <= 2147483647  holds" in text
    assert "write: kv_cache-write-warp_rows-sm_90a-kv.v41_interleaved-rule.pow2_scale_floor-rows.bf16\n" in text
    assert "grid: 50 CTAs, a warp a row; 310400 B of traffic, 0.0" in text  # (528 + 1024) x 200
    assert "[KV-07] row_stride_bytes == token_bytes" in text
    refused = kernels.explain("kv_cache", batch=2**31)
    assert "refuses" in refused and "grid:" not in refused


def table_read(**changes):
    """Three requests over pools of 3 pages of 5 tokens: 4 tokens from position 3, none, and 2 from 0."""
    given = {
        "block_table": torch.tensor([[0, 2], [99, 99], [1, -1]]),
        "row_starts": torch.tensor([0, 4, 4, 6]),
        "token_starts": torch.tensor([3, -7, 0]),
    }
    return {name: tensor.int() for name, tensor in {**given, **changes}.items()}


BAD_TABLES = [
    ({"row_starts": torch.tensor([-1, 4, 4, 6])}, "[KV-14] row_starts[0] = -1: ", "so it is 0..6 (1 outside)"),
    ({"row_starts": torch.tensor([0, 4, 3, 6])}, "[KV-14] row_starts[2] = 3: ", "so it is 4..6 (1 outside)"),
    ({"row_starts": torch.tensor([0, 4, 4, 7])}, "[KV-14] row_starts[3] = 7: ", "so it is 4..6 (1 outside)"),
    ({"token_starts": torch.tensor([-1, 0, 0])}, "[KV-15] block_table: request 0 reads 4 tokens from position -1 ", ""),
    ({"token_starts": torch.tensor([7, 0, 0])}, "[KV-15] block_table: request 0 reads 4 tokens from position 7 ", ""),
    ({"block_table": torch.zeros(3, 0)}, "[KV-15] ", "0 pages, which hold 0 tokens: pass a wider table or fewer rows"),
    ({"block_table": torch.tensor([[0, 3], [0, 0], [1, 1]])}, "[KV-16] block_table[0, 1] = 3: ", "(2 rows read past"),
    ({"block_table": torch.tensor([[0, 0], [0, 0], [9, 9]])}, "[KV-16] block_table[2, 0] = 9: ", "(2 rows read past"),
]


@pytest.mark.parametrize(("changes", "start", "part"), BAD_TABLES, ids=[start for _, start, _ in BAD_TABLES])
def test_a_block_table_out_of_range_is_an_error_when_asked_for(monkeypatch, changes, start, part):
    given = table_read(**changes)
    make()[1].kv_read(cache(), rows=ROWS, **given)
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    with pytest.raises(GuardError) as caught:
        kernels.kv_read(cache(), rows=ROWS, **given)
    assert str(caught.value).startswith(start) and part in str(caught.value)
    assert not driver.launches


def test_padding_of_a_block_table_passes_the_check(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    kernels.kv_read(cache(), rows=ROWS, **table_read())  # the empty request's page and start are not read
    kernels.kv_read(cache(), rows=ROWS + 3, **table_read())  # rows behind the last request
    kernels.kv_read(cache(), rows=ROWS, **table_read(block_table=torch.tensor([[0, -1], [0, 0], [-5, 0]])))
    kernels.kv_read(cache(), rows=ROWS, **table_read(token_starts=torch.tensor([6, 0, 8])))  # to the table's last token
    given = table_read()
    kernels.kv_read(cache(), rows=ROWS, block_table=given["block_table"], row_starts=given["row_starts"])
    none = torch.zeros(0, 2, dtype=torch.int32)
    kernels.kv_read(cache(), rows=ROWS, block_table=none, row_starts=torch.zeros(1, dtype=torch.int32))
    assert len(driver.launches) == 6
