"""The index cache's ops through the runtime: argument blocks, and every argument that does not fit."""

from dataclasses import replace

import pytest
import torch
from fake_driver import GOOD, FakeDriver, fake_cubins, unpack

from dsagen.check.cache_inputs import PoolShape
from dsagen.check.index_run import poisoned_cache
from dsagen.errors import DeviceError, FrozenError, GuardError
from dsagen.index_format import index_format
from dsagen.runtime.api import Kernels
from dsagen.spec import load_spec

pytestmark = pytest.mark.usefixtures("each_launcher")

KEYS, PAGES, PAGE = 6, 3, 5
SPEC = {"model": "v32", "heads": 16, "archs": ["sm_90a"], "ops": ["index_cache"]}


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


def cache(keys="fp8", pages=PAGES, page_size=PAGE, pad_bytes=0, dim=128):
    return poisoned_cache(index_format(keys), dim, PoolShape(pages, page_size), pad_bytes, "cpu")


def rows(count=KEYS, width=128, dtype=torch.bfloat16):
    return torch.zeros(count, width, dtype=dtype)


def slots(count=KEYS, dtype=torch.int64):
    return torch.arange(count, dtype=dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def off(tensor, bytes_off):
    """The same elements behind so many bytes of a multiple of 16."""
    size = tensor.numel() * tensor.element_size()
    raw = torch.zeros(size + 32, dtype=torch.uint8)
    first = (bytes_off - raw.data_ptr()) % 16
    return raw[first : first + size].view(tensor.dtype).view(tensor.shape)


WRITE = {"keys": rows(), "k_cache": cache(), "slots": slots()}
TABLE, STARTS = torch.zeros(2, 4, dtype=torch.int32), ints(0, 4, 7)
GATHER = {"k_cache": cache(), "block_table": TABLE, "row_starts": STARTS, "rows": 7}


def test_block_of_a_write():
    driver, kernels = make()
    x, k_cache, index = rows(KEYS + 3, 136)[:, :128], cache(pad_bytes=32), slots()
    assert kernels.index_write(x, k_cache, index) is None
    plan, record, block = block_of(kernels, driver)
    assert dict(plan.variant.axes) == {"keys": "fp8", "dim": 128, "rule": "pow2_amax_floor", "rows": "bf16"}
    assert (record.config.grid, record.config.threads, record.config.smem_bytes) == (1, 128, 0)
    multiplier, shift = block.pop("page_multiplier"), block.pop("page_shift")
    assert all(n * multiplier >> (31 + shift) == n // PAGE for n in range(100))
    assert block == {
        "keys": x.data_ptr(), "key_stride": 136, "slots": index.data_ptr(), "slots_wide": 1, "rows_count": KEYS,
        "cache": k_cache.data_ptr(), "page_stride_bytes": 5 * 132 + 32, "pool_tokens": PAGES * PAGE,
        "page_size": PAGE, "wide_pages": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("pad", "moved", "wide"), [(12, 0, 1), (0, 0, 0), (12, 4, 0), (4, 0, 0)])
def test_stores_are_wide_where_pages_start_at_multiples_of_16(pad, moved, wide):
    driver, kernels = make()
    k_cache = cache(pad_bytes=pad)
    whole = torch.empty(0, dtype=torch.uint8).set_(k_cache.untyped_storage())
    placed = off(whole, moved).as_strided(k_cache.shape, k_cache.stride(), off(whole, moved).storage_offset())
    assert placed.data_ptr() % 16 == moved
    kernels.index_write(rows(), placed, slots())
    assert block_of(kernels, driver)[2]["wide_pages"] == wide


def test_block_of_a_write_of_mxfp4_by_narrow_slots():
    driver, kernels = make(index={"keys": "mxfp4"}, index_write={"rows": "fp32", "rule": "pow2_scale_floor"})
    x, k_cache, index = rows(dtype=torch.float32), cache("mxfp4", page_size=4), slots(KEYS, torch.int32)
    kernels.index_write(x, k_cache, index)
    plan, _, block = block_of(kernels, driver)
    assert plan.variant.axis("rule") == "pow2_scale_floor" and plan.variant.axis("rows") == "fp32"
    assert (block["page_stride_bytes"], block["wide_pages"], block["slots_wide"]) == (4 * 68, 1, 0)


@pytest.mark.parametrize(("keys", "codes", "scales"), [("fp8", (torch.float8_e4m3fn, 128), torch.float32),
                                                       ("mxfp8", (torch.float8_e4m3fn, 128), torch.int32),
                                                       ("mxfp4", (torch.uint8, 64), torch.int32)])  # fmt: skip
def test_block_of_a_gather(keys, codes, scales):
    driver, kernels = make(index={"keys": keys})
    k_cache, table, first = cache(keys), torch.zeros(2, 9, dtype=torch.int32)[:, :4], ints(1, 0)
    found = kernels.index_gather(k_cache, table, STARTS, 7, token_starts=first)
    assert [(t.dtype, t.shape) for t in found] == [(codes[0], (7, codes[1])), (scales, (7,))]
    plan, _, block = block_of(kernels, driver)
    assert plan.variant.kernel == "gather"
    assert (block["codes"], block["code_stride_bytes"]) == (found[0].data_ptr(), codes[1])
    assert (block["scales"], block["scale_stride_bytes"]) == (found[1].data_ptr(), 4)
    assert (block["rows_count"], block["requests"], block["table_columns"], block["table_stride"]) == (7, 2, 4, 9)
    assert (block["row_starts"], block["token_starts"]) == (STARTS.data_ptr(), first.data_ptr())


def test_outputs_that_are_given():
    driver, kernels = make()
    codes, scales = torch.zeros(7, 160, dtype=torch.uint8)[:, 16:144], torch.zeros(21)[1::3]
    found = kernels.index_gather(**GATHER, codes=codes, scales=scales)
    assert [t.data_ptr() for t in found] == [codes.data_ptr(), scales.data_ptr()]
    block = block_of(kernels, driver)[2]
    assert (block["code_stride_bytes"], block["scale_stride_bytes"], block["token_starts"]) == (160, 12, 0)


def test_no_keys():
    driver, kernels = make()
    kernels.index_write(rows(0), cache(), slots(0))
    kernels.index_write(rows(), cache(), slots(0))
    codes, scales = kernels.index_gather(cache(), torch.zeros(0, 3, dtype=torch.int32), ints(0), 0)
    assert (codes.shape, scales.shape, driver.launches) == ((0, 128), (0,), [])
    kernels.index_gather(cache(), torch.zeros(0, 3, dtype=torch.int32), ints(0), 4)
    assert block_of(kernels, driver)[2]["requests"] == 0


def test_strides_of_single_keys_pages_and_tokens_do_not_matter():
    driver, kernels = make()
    k_cache = cache(pages=1, page_size=1).as_strided((1, 1, 1, 132), (7, 3, 1, 1))
    kernels.index_write(rows(1).as_strided((1, 128), (7, 1)), k_cache, slots(1))
    _, _, block = block_of(kernels, driver)
    assert (block["key_stride"], block["page_stride_bytes"], block["pool_tokens"]) == (0, 132, 1)


WRONG_WRITES = [
    ({"keys": [1.0]}, "[T-01] keys: expected a torch.Tensor, found list"),
    ({"slots": None}, "[T-01] slots: expected a torch.Tensor, found NoneType"),
    ({"keys": rows().requires_grad_()}, "[T-02] keys: requires grad"),
    ({"keys": rows().to("meta")}, "[T-03] keys: on meta, expected a CUDA device"),
    ({"slots": slots().to("meta")}, "[T-03] slots: on meta, keys is on cpu"),
    ({"keys": rows(dtype=torch.float32)}, "[T-04] keys: dtype float32, expected bfloat16 for [keys, dim]"),
    ({"keys": rows(width=64)}, "[T-06] keys: shape (6, 64), expected [keys, dim] = (*, 128)"),
    ({"keys": rows()[0]}, "[T-05] keys: 1 dims (128,), expected 2"),
    ({"keys": rows().t().contiguous().t()}, "[T-07] keys: last dim has stride 6, expected 1"),
    ({"keys": off(rows(), 8)}, "[KV-13] keys: address 0x"),
    ({"keys": rows(width=132)[:, :128]}, "[KV-08] keys: row stride 264 B"),
    ({"slots": slots(7)}, "[IC-03] slots: 7 for 6 keys: each slot takes a key"),
    ({"slots": slots().float()}, "[T-04] slots: dtype float32, expected int32 or int64"),
    ({"slots": slots()[:, None]}, "[T-05] slots: 2 dims (6, 1)"),
    ({"slots": slots(12)[::2]}, "[T-07] slots: last dim has stride 2"),
    ({"k_cache": cache("mxfp4")}, "[T-06] k_cache: shape (3, 5, 1, 68), expected [pages, page_size, 1, bytes of a fp8"),
    ({"k_cache": cache().view(torch.float8_e5m2)}, "[T-04] k_cache: dtype float8_e5m2, expected float8_e4m3fn or u"),
    ({"k_cache": cache()[:, :, 0]}, "[T-05] k_cache: 3 dims"),
    ({"k_cache": cache(pad_bytes=2)}, "[IL-09] k_cache: page stride 662 B is no multiple of 4 B"),
    ({"k_cache": off(cache(), 2)}, "[IL-15] k_cache: base address 0x"),
    ({"k_cache": cache()[:0]}, "[IL-08] k_cache: 0 pages of 5 keys"),
    ({"k_cache": cache()[:1].expand(3, 5, 1, 132)}, "[IL-10] k_cache: row stride 132 B and page stride 0 B do not"),
    ({"k_cache": cache()[:, ::2]}, "[IL-10] k_cache: row stride 264 B"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG_WRITES, ids=[message[:40] for _, message in WRONG_WRITES])
def test_a_write_that_does_not_fit_is_named(kernels, changes, message):
    with pytest.raises(GuardError) as caught:
        kernels.index_write(**{**WRITE, **changes})
    assert str(caught.value).startswith(message)


BUFFER = bytearray(64)


def outs(**changes):
    return {"codes": torch.zeros(7, 128, dtype=torch.uint8), "scales": torch.zeros(7), **changes}


WRONG_GATHERS = [
    ({"rows": -1}, "[T-17] rows: -1 is negative: pass how many rows row_starts ends with"),
    ({"rows": 7.0}, "[T-12] rows: expected a whole number, found 7.0"),
    ({"rows": 2**31}, "[KV-03] rows: 2147483648 rows exceed"),
    ({"block_table": None}, "[T-01] block_table: expected a torch.Tensor, found NoneType"),
    ({"block_table": TABLE.long()}, "[T-04] block_table: dtype int64, expected int32"),
    ({"row_starts": STARTS[:2]}, "[T-06] row_starts: shape (2,), expected [requests + 1] = (3,)"),
    ({"token_starts": STARTS}, "[T-06] token_starts: shape (3,), expected [requests] = (2,)"),
    ({"token_starts": ints(0, 0).to("meta")}, "[T-03] token_starts: on meta, k_cache is on cpu"),
    ({"codes": outs()["codes"]}, "[T-17] codes, scales: one without the other: pass both, or neither"),
    (outs(codes=torch.zeros(7, 64).byte()), "[T-06] codes: shape (7, 64), expected [rows, bytes of a key's codes]"),
    (outs(codes=torch.zeros(7, 128)), "[T-04] codes: dtype float32, expected float8_e4m3fn or uint8 or int8"),
    (outs(codes=torch.zeros(1, 128).byte().expand(7, 128)), "[T-08] codes: strides (0, 1) of shape (7, 128) let"),
    (outs(codes=torch.zeros(7, 136).byte()[:, :128]), "[KV-08] codes: row stride 136 B"),
    (outs(scales=torch.zeros(7).int()), "[T-04] scales: dtype int32, expected float32 for [rows]"),
    (outs(scales=torch.zeros(1).expand(7)), "[T-08] scales: strides (0,) of shape (7,) let"),
    (outs(scales=torch.frombuffer(BUFFER, dtype=torch.float32, count=7, offset=2)), "[IC-04] scales: address 0x"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG_GATHERS, ids=[message[:40] for _, message in WRONG_GATHERS])
def test_a_gather_that_does_not_fit_is_named(kernels, changes, message):
    with pytest.raises(GuardError) as caught:
        kernels.index_gather(**{**GATHER, **changes})
    assert str(caught.value).startswith(message)


def test_the_wrong_scale_kind_of_the_spec_is_named():
    _, mx = make(index={"keys": "mxfp8"})
    with pytest.raises(GuardError, match=r"^\[T-04\] scales: dtype float32, expected int32 for \[rows\]"):
        mx.index_gather(**GATHER, **outs())


def test_outputs_share_no_memory_with_inputs(kernels):
    k_cache = cache(page_size=8)
    flat = torch.empty(0, dtype=torch.uint8).set_(k_cache.untyped_storage())
    with pytest.raises(GuardError, match=r"^\[T-08\] k_cache: its memory overlaps that of keys"):
        kernels.index_write(flat[: 3 * 256].view(torch.bfloat16).view(3, 128), k_cache, slots(3))
    with pytest.raises(GuardError, match=r"^\[T-08\] codes: its memory overlaps that of k_cache"):
        codes = flat[: 7 * 128].view(7, 128)
        kernels.index_gather(**{**GATHER, "k_cache": k_cache}, **outs(codes=codes))


def test_the_op_needs_to_be_declared():
    logits = Kernels(load_spec("v32_indexer_h128"), open_driver=FakeDriver, read=fake_cubins)
    for call in (lambda: logits.index_write(**WRITE), lambda: logits.index_gather(**GATHER)):
        with pytest.raises(
            GuardError, match=r"^\[T-11\] index_cache: the spec v32_indexer_h128 declares ops indexer_l"
        ):
            call()


def test_what_names_no_key_is_an_error_when_asked_for(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    driver, kernels = make()
    kernels.index_write(rows(), cache(), torch.tensor([-5, 0, 14, -1, 3, 4]))
    with pytest.raises(GuardError, match=r"^\[KV-11\] slots\[2\] = 15: the pool holds 15 tokens, .* \(2 past it\)"):
        kernels.index_write(rows(), cache(), torch.tensor([-5, 0, 15, -1, 2**40, 4]))
    good = torch.tensor([[0, 2, -1, 99], [1, -1, 0, 0]]).int()
    kernels.index_gather(cache(), good, STARTS, 9)
    for changes, message in (
        ({"row_starts": ints(0, 8, 7)}, r"^\[KV-14\] row_starts\[1\] = 8: .* it is 0\.\.7"),
        ({"token_starts": ints(18, 0)}, r"^\[KV-15\] block_table: request 0 reads 4 tokens from position 18 "),
        ({"block_table": good + 2}, r"^\[KV-16\] block_table\[1, 0\] = 3: the cache has 3 pages"),
    ):
        with pytest.raises(GuardError, match=message):
            kernels.index_gather(**{**GATHER, "block_table": good, **changes})
    driver.capturing = True
    for call in (lambda: kernels.index_write(**WRITE), lambda: kernels.index_gather(**GATHER)):
        with pytest.raises(GuardError, match=r"^\[T-13\] DSAGEN_CHECK_INDICES"):
            call()


def test_capture_needs_loaded_kernels():
    driver, kernels = make()
    driver.capturing = True
    with pytest.raises(FrozenError, match="during CUDA graph capture is not possible"):
        kernels.index_write(**WRITE)
    driver.capturing = False
    kernels.prepare()
    kernels.freeze()
    driver.capturing = True
    kernels.index_write(**WRITE)
    kernels.index_gather(**GATHER, **outs())
    assert len(driver.launches) == 2 and len(driver.loads) == 2


def test_a_failing_launch_names_op_and_kernel():
    driver, kernels = make()
    driver.launch_error = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(
        DeviceError, match=r"^index_cache: index_cache-write-lane_pieces-sm_90a-.* failed on device 0: "
    ):
        kernels.index_write(**WRITE)


def test_explain_tells_kernels_grid_and_floor(kernels):
    text = kernels.explain("index_cache", batch=100, s_q=2)
    assert text.startswith("index_cache: v32_h16 on device 0 (fake H200, sm_90a, 132 SMs)\nshape: 200 keys\n")
    assert "write: index_cache-write-lane_pieces-sm_90a-keys.fp8-dim.128-rule.pow2_amax_floor-rows.bf16\n" in text
    assert "grid: 13 CTAs; 77600 B of traffic, 0.0" in text  # (132 + 256) x 200
    refused = kernels.explain("index_cache", batch=2**31)
    assert "refuses" in refused and "grid:" not in refused
