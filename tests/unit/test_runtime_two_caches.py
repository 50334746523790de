"""Calls of sparse decode with caches of every format, and with a second one: arguments, and every refusal."""

import math
import struct

import pytest
import torch
from fake_driver import FakeDriver, fake_cubins

from dsagen.check.cache import allocate_cache
from dsagen.errors import GuardError
from dsagen.families.sparse_decode.family import FAMILY
from dsagen.kv_format import KV_FORMATS, kv_format
from dsagen.matrix import expand
from dsagen.runtime.api import Kernels
from dsagen.spec import DeploymentSpec, load_spec

B, S, H, TOPK = 2, 3, 16, 40
UNPACK = {"pointer": "Q", "u64": "Q", "i64": "q", "u32": "I", "i32": "i", "f32": "f"}


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("DSAGEN_DEBUG_SYNC", "DSAGEN_CHECK_INDICES"):
        monkeypatch.delenv(name, raising=False)


def kernels_of(spec):
    driver = FakeDriver()
    return driver, Kernels(spec, open_driver=lambda: driver, read=fake_cubins)


def spec_of(kv, **changes):
    return DeploymentSpec(model="custom", heads=H, archs=["sm_90a"], ops=["sparse_decode"], kv=kv, topk=64, **changes)


def cache_of(record, pages, page_size):
    rows, *rope = allocate_cache(record, pages, page_size, "cpu").values()
    return {"k_cache": rows, **({"kpe_cache": rope[0]} if rope else {})}


def arguments(driver, spec):
    """Arguments of the main kernel's last launch, by name."""
    (main,) = [plan for plan in expand(spec).plans() if plan.variant.kernel == "main"]
    launch = [record for record in driver.launches if record.symbol == main.symbol][-1]
    assert launch.symbol == FAMILY.plan(main.variant).symbol
    return {
        field.name: struct.unpack_from("<" + UNPACK[field.ctype], launch.block, field.offset_bytes)[0]
        for field in main.params
    }


def query(record):
    return torch.zeros(B, S, H, record.d_qk, dtype=torch.bfloat16)


def ids(columns=TOPK):
    return torch.zeros(B, S, columns, dtype=torch.int32)


@pytest.mark.parametrize("format_id", KV_FORMATS)
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_rows_and_parts_are_where_the_record_says(format_id, page_size):
    record, spec = kv_format(format_id), spec_of(format_id)
    driver, kernels = kernels_of(spec)
    caches = cache_of(record, 3, page_size)
    kernels.sparse_decode(query(record), indices=ids(), **caches)
    found = arguments(driver, spec)
    strides = {name: cache.view(torch.uint8).stride(0) for name, cache in caches.items()}
    bases = {name: cache.data_ptr() for name, cache in caches.items()}
    assert found["pool_tokens"] == 3 * page_size
    for page, slot in ((0, 0), (2, page_size - 1)):
        row = found["kv"] + page * found["page_stride_bytes"] + slot * found["row_stride_bytes"]
        values = record.segment("values")
        assert row == bases["k_cache"] + values.byte_address(page, slot, 0, page_size, strides["k_cache"])
        for segment in record.segments:
            name = "k_cache" if segment.tensor == values.tensor else "kpe_cache"
            at = bases[name] + segment.byte_address(page, slot, 0, page_size, strides[name])
            if "kv_part" not in found or (name == "k_cache" and segment.section_bytes_per_token == 0):
                assert at == row + segment.offset_bytes
            else:
                pages, rows = found["part_page_stride_bytes"], found["part_row_stride_bytes"]
                assert at == found["kv_part"] + page * pages + slot * rows


def two(**changes):
    """Tensors of a call with two caches that differ in every size."""
    main, extra = kv_format("v41_page_split"), kv_format("v41_fp4_page_split")
    given = {
        "q": query(main),
        "k_cache": cache_of(main, 4, 16)["k_cache"],
        "indices": ids(),
        "extra_k_cache": cache_of(extra, 7, 5)["k_cache"],
        "extra_indices": ids(30),
        "extra_topk_length": torch.zeros(B, dtype=torch.int32),
        **changes,
    }
    return {name: tensor for name, tensor in given.items() if tensor is not None}


TWO = load_spec("v41_page_split_h64").replace(heads=H)


def test_the_second_cache_has_arguments_of_its_own():
    driver, kernels = kernels_of(TWO)
    given = two()
    kernels.sparse_decode(**given)
    found = arguments(driver, TWO)
    assert (found["page_size"], found["extra_page_size"]) == (16, 5)
    assert (found["pool_tokens"], found["extra_pool_tokens"]) == (64, 35)
    assert (found["topk"], found["extra_topk"]) == (TOPK, 30)
    assert (found["row_stride_bytes"], found["extra_row_stride_bytes"]) == (512, 256)
    assert (found["part_row_stride_bytes"], found["extra_part_row_stride_bytes"]) == (16, 32)
    assert found["extra_kv"] == given["extra_k_cache"].data_ptr()
    assert found["extra_kv_part"] == found["extra_kv"] + 5 * 256
    assert found["extra_indices"] == given["extra_indices"].data_ptr()
    assert found["extra_topk_length"] == given["extra_topk_length"].data_ptr()
    assert found["topk_length"] == 0


def test_a_call_may_leave_the_second_cache_out():
    driver, kernels = kernels_of(TWO)
    kernels.sparse_decode(**two(extra_k_cache=None, extra_indices=None, extra_topk_length=None))
    found = arguments(driver, TWO)
    assert {found[name] for name in ("extra_kv", "extra_indices", "extra_topk", "extra_pool_tokens")} == {0}
    kernels.sparse_decode(**two(extra_indices=ids(0)))
    assert arguments(driver, TWO)["extra_topk"] == 0


def test_plans_are_of_both_widths():
    _, kernels = kernels_of(TWO)
    plan = kernels.plan_sparse_decode(B, S, TOPK, extra_topk=30)
    kernels.sparse_decode(**two(), plan=plan)
    with pytest.raises(GuardError, match=r"\[T-09\] plan: made for extra_topk 30, the tensors have extra_topk 29"):
        kernels.sparse_decode(**two(extra_indices=ids(29)), plan=plan)
    needed = kernels.sparse_decode_workspace_bytes(1, 1, 128, extra_topk=512, num_splits=10)
    assert needed == -(-(10 * H * 4) // 256) * 256 + 10 * H * 512 * 4
    with pytest.raises(GuardError, match=r"\[SD-04\] num_splits 11: 640 index columns .* are 10 tiles"):
        kernels.plan_sparse_decode(1, 1, 128, extra_topk=512, num_splits=11)


def test_explain_takes_the_capacities_of_both_caches():
    _, kernels = kernels_of(TWO)
    assert "topk 128 + 512 of the second cache" in kernels.explain(batch=4)
    assert "[SD-16]" in kernels.explain(batch=4, extra_topk=513)


def test_a_plan_of_a_second_cache_that_the_spec_lacks_is_refused():
    _, kernels = kernels_of(spec_of("v4"))
    for ask in (kernels.plan_sparse_decode, kernels.sparse_decode_workspace_bytes):
        for splits in (None, 2):
            with pytest.raises(GuardError) as caught:
                ask(B, S, TOPK, extra_topk=128, num_splits=splits)
            assert str(caught.value) == "[T-17] extra_topk: 128: the spec declares no extra_kv: leave it out"
    with pytest.raises(GuardError, match=r"^\[T-17\] extra_topk: 1: the spec declares no extra_kv: leave it out"):
        kernels.explain(batch=4, extra_topk=1)
    with pytest.raises(GuardError, match=r"^\[T-12\] extra_topk: expected a whole number, found '1' \(str\)"):
        kernels.plan_sparse_decode(B, S, TOPK, extra_topk="1")
    assert kernels.plan_sparse_decode(B, S, TOPK, extra_topk=0).extra_topk == 0
    assert "chosen: " in kernels.explain(batch=4, extra_topk=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"topk": 0}, "[SD-06] topk: 0 columns, the spec declares topk 128: pass 1..128 columns or raise `topk`"),
        ({"topk": 129}, "[SD-06] topk: 129 columns, the spec declares topk 128: pass 1..128 columns or raise `topk`"),
        (
            {"extra_topk": -1},
            "[SD-16] extra_topk: -1 columns, the spec declares extra_kv.topk 512: pass 0..512 columns",
        ),
        ({"extra_topk": 513}, "[SD-16] extra_topk: 513 columns, the spec declares extra_kv.topk 512: pass 0..512"),
        ({"batch": -1}, "[SD-00] batch: -1 is outside 0..2147483647: pass how many requests a call has"),
        ({"s_q": -2}, "[SD-00] s_q: -2 is outside 0..2147483647: pass how many query tokens a request has"),
        (
            {"num_splits": 0},
            "[SD-00] num_splits: 0 is outside 1..2147483647: pass 1 up to the tiles of an index row, or",
        ),
        ({"num_splits": 11}, "[SD-04] num_splits 11: 640 index columns in tiles of 64 tokens are 10 tiles"),
    ],
)
def test_a_plan_names_its_own_arguments(sizes, message):
    _, kernels = kernels_of(TWO)
    given = {"batch": 1, "s_q": 1, "topk": 128, "extra_topk": 512, **sizes}
    for ask in (kernels.plan_sparse_decode, kernels.sparse_decode_workspace_bytes):
        with pytest.raises(GuardError) as caught:
            ask(**given)
        assert str(caught.value).startswith(message)


def wrong(kernels, **changes):
    with pytest.raises(GuardError) as caught:
        kernels.sparse_decode(**two(**changes))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("extra_indices", None, "[T-17] extra_indices: missing beside extra_k_cache: pass both or neither"),
        ("extra_k_cache", None, "[T-17] extra_indices: there is no extra_k_cache: leave it out"),
        ("extra_indices", ids(513), "[SD-16] extra_indices: 513 columns, the spec declares extra_kv.topk 512"),
        ("extra_indices", ids().long(), "[T-04] extra_indices: dtype int64, expected int32"),
        ("extra_indices", ids()[:1], "[T-06] extra_indices: shape (1, 3, 40), expected [batch, s_q, extra_topk]"),
        ("extra_topk_length", torch.zeros(3, dtype=torch.int32), "[T-06] extra_topk_length: shape (3,)"),
        ("extra_k_cache", torch.zeros(4, 5, 1, 528, dtype=torch.uint8), "[T-06] extra_k_cache: shape (4, 5, 1, 528)"),
        ("extra_k_cache", torch.zeros(0, 5, 1, 288, dtype=torch.uint8), "[SD-10] extra_k_cache: 0 pages"),
        ("extra_kpe_cache", torch.zeros(4, 5, 1, 64).bfloat16(), "[T-17] extra_kpe_cache: format v41_fp4_page_split"),
        ("kpe_cache", torch.zeros(4, 16, 1, 64).bfloat16(), "[T-17] kpe_cache: format v41_page_split has one tensor"),
    ],
)
def test_a_wrong_second_cache_is_named(name, value, message):
    assert message in wrong(kernels_of(TWO)[1], **{name: value})


def test_pages_of_either_cache_may_be_padded_by_multiples_of_16_bytes_and_tokens_are_adjacent():
    _, kernels = kernels_of(TWO)
    record = kv_format("v41_fp4_page_split")

    def pages(stride, token_stride=288):
        raw = torch.zeros(7 * stride + 16 * token_stride, dtype=torch.uint8)
        start = -raw.data_ptr() % 16
        return raw.as_strided((7, 5, 1, 288), (stride, token_stride, 288, 1), start)

    kernels.sparse_decode(**two(extra_k_cache=pages(5 * record.record_bytes + 48)))
    assert "[SD-11] extra_k_cache: page stride 1448 B" in wrong(kernels, extra_k_cache=pages(5 * 288 + 8))
    assert "[SD-12] extra_k_cache: token stride 304 B" in wrong(kernels, extra_k_cache=pages(2048, 304))
    assert "[SD-12] extra_k_cache: token stride 288 B and page stride 1424 B" in wrong(
        kernels, extra_k_cache=pages(1424)
    )


def test_a_spec_without_a_second_cache_refuses_one():
    spec = spec_of("v41_page_split")
    given = two()
    with pytest.raises(GuardError, match=r"\[T-17\] extra_k_cache: the spec declares no extra_kv"):
        kernels_of(spec)[1].sparse_decode(**given)


def test_two_tensors_of_a_cache_have_the_same_pages():
    record = kv_format("bf16_split")
    _, kernels = kernels_of(spec_of("bf16_split"))
    caches = cache_of(record, 4, 8)
    with pytest.raises(GuardError, match=r"\[T-17\] kpe_cache: format bf16_split keeps rotary dims in their own"):
        kernels.sparse_decode(query(record), caches["k_cache"], ids())
    with pytest.raises(GuardError, match=r"\[SD-17\] kpe_cache: 3 pages of 8 tokens, k_cache has 4 of 8"):
        kernels.sparse_decode(query(record), caches["k_cache"], ids(), kpe_cache=caches["kpe_cache"][:3])


def test_values_of_both_lists_are_checked(monkeypatch):
    monkeypatch.setenv("DSAGEN_CHECK_INDICES", "1")
    _, kernels = kernels_of(TWO)
    far = ids(30)
    far[1, 2, 4] = 35
    lengths = torch.tensor([30, 30], dtype=torch.int32)
    assert wrong(kernels, extra_indices=far, extra_topk_length=lengths).startswith(
        "[SD-22] extra_indices[1, 2, 4] = 35: extra_k_cache holds 35 tokens"
    )
    kernels.sparse_decode(**two(extra_indices=far))  # past the length nothing is looked at
    lengths[0] = 31
    assert wrong(kernels, extra_topk_length=lengths).startswith("[SD-21] extra_topk_length[0] = 31: the index rows")


def test_outputs_share_no_memory_with_the_second_cache():
    _, kernels = kernels_of(TWO)
    given = two()
    size = math.prod((B, S, H, 512))
    raw = torch.zeros(2 * size, dtype=torch.uint8)
    out = raw.view(torch.bfloat16).view(B, S, H, 512)
    cache = raw[: 7 * 5 * 288].view(7, 5, 1, 288)
    with pytest.raises(GuardError, match=r"\[T-08\] out: its memory overlaps that of extra_k_cache"):
        kernels.sparse_decode(**{**given, "extra_k_cache": cache}, out=out)
