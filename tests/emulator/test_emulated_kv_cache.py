"""The cache kernels as nvcc compiles them, on the emulator, held byte for byte to the torch reference."""

from __future__ import annotations

import pytest
import torch
from cache_rows import EmulatedCaches, convert, copied, kernel, pool_arguments, read, same_bytes, storage, write

from dsagen.check.cache import allocate_cache
from dsagen.check.kv_cases import Probe, kv_cases
from dsagen.check.run import KernelCache, run_cases
from dsagen.emulator import Memory
from dsagen.families.kv_cache.geometry import ROW_TYPES, other_layout
from dsagen.families.kv_cache.reference import (
    convert_reference,
    read_reference,
    table_slots,
    write_reference,
)
from dsagen.kv_format import KV_FORMATS, KvFormat, kv_format
from dsagen.kv_rule import default_rule, rules_of
from dsagen.spec import load_spec

FORMATS = pytest.mark.parametrize("record", KV_FORMATS.values(), ids=KV_FORMATS)
ARCHS = ("sm_90a", "sm_80")
ARCHS_OF_ALL_CLASSES = ("sm_86", "sm_89", "sm_100a", "sm_120a")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGES, PAGE = 3, 5


def rows_of(record: KvFormat, rows: str, count: int, seed: int) -> torch.Tensor:
    """Groups of every magnitude, zeros of both signs, ties, values far above the rest, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, record.d_qk, generator=generator)
    x *= torch.exp2(torch.randint(-14, 9, (count, record.d_qk // 16), generator=generator).float()).repeat_interleave(
        16, 1
    )
    x[0], x[1] = 0.0, -0.0
    x[2, ::17] = 30_000.0
    x[3] = torch.randint(-13, 14, (record.d_qk,), generator=generator) / 4.0
    x[4] = 448.0
    x[5, 100], x[6, 300], x[6, 7] = torch.nan, torch.inf, -torch.inf
    x[7] *= 2.0**-14
    return x.to(DTYPES[rows])


def slots_for(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Distinct slots, one negative and one just past the pool."""
    slots = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(seed))[:count]
    slots[-1], slots[-2] = -1, PAGES * PAGE
    return slots.to(dtype)


@FORMATS
@pytest.mark.parametrize("arch", ARCHS)
def test_written_and_read_rows(record: KvFormat, arch: str) -> None:
    for rule in rules_of(record) if arch == "sm_90a" else (default_rule(record),):
        caches = allocate_cache(record, PAGES, PAGE, "cpu", extra_bytes=48)
        wanted = copied(caches)
        x, slots = rows_of(record, "bf16", 13, 3), slots_for(13, torch.int64, 4)
        write(kernel("write", arch, kv=record.format_id, rule=rule, rows="bf16"), record, caches, x, slots)
        write_reference(record, wanted, x, slots, rule)
        assert same_bytes(caches, wanted), rule
    every = torch.arange(-1, PAGES * PAGE + 1, dtype=torch.int32)
    found = read(kernel("read", arch, kv=record.format_id), record, caches, len(every), every)
    torch.testing.assert_close(found, read_reference(record, caches, every), rtol=0, atol=0, equal_nan=True)
    assert (found[[0, -1]] == 0).all()


@pytest.mark.parametrize("arch", ARCHS_OF_ALL_CLASSES)
def test_written_and_read_rows_on_other_archs(arch: str) -> None:
    test_written_and_read_rows(kv_format("v41_fp4_interleaved"), arch)
    test_written_and_read_rows(kv_format("v32_pow2"), arch)


@pytest.mark.parametrize("rows", ["fp16", "fp32"])
@pytest.mark.parametrize(
    "format_id", ["v32", "v4", "v41_interleaved", "v41_fp4_page_split", "bf16", "fp16", "bf16_split"]
)
def test_rows_of_other_dtypes(format_id: str, rows: str) -> None:
    record = kv_format(format_id)
    rule = default_rule(record)
    caches = allocate_cache(record, PAGES, PAGE, "cpu")
    wanted = copied(caches)
    x, slots = rows_of(record, rows, 12, 8), slots_for(12, torch.int32, 9)
    write(kernel("write", "sm_90a", kv=format_id, rule=rule, rows=rows), record, caches, x, slots)
    write_reference(record, wanted, x, slots, rule)
    assert same_bytes(caches, wanted)
    assert set(DTYPES) == set(ROW_TYPES)


@pytest.mark.parametrize("format_id", ["v32", "v41_interleaved", "bf16_split"])
def test_rotary_dims_from_a_tensor_of_their_own(format_id: str) -> None:
    record = kv_format(format_id)
    rule = default_rule(record)
    caches = allocate_cache(record, PAGES, PAGE, "cpu")
    wanted = copied(caches)
    x, slots = rows_of(record, "bf16", 9, 5), slots_for(9, torch.int64, 6)
    k_pe = torch.cat((x[:, record.d_nope :], torch.full((9, 24), torch.nan, dtype=x.dtype)), 1)
    wide = torch.cat((torch.full((9, 8), torch.nan, dtype=x.dtype), x[:, : record.d_nope]), 1)[:, 8:]
    write(kernel("write", "sm_90a", kv=format_id, rule=rule, rows="bf16"), record, caches, wide, slots, k_pe)
    write_reference(record, wanted, x, slots, rule)
    assert same_bytes(caches, wanted)


@pytest.mark.parametrize("format_id", ["v41_page_split", "v32"])
@pytest.mark.parametrize("with_starts", [False, True])
def test_rows_by_a_block_table(format_id: str, with_starts: bool) -> None:
    record = kv_format(format_id)
    caches = allocate_cache(record, PAGES, PAGE, "cpu")
    ids = torch.arange(PAGES * PAGE)
    write_reference(record, caches, rows_of(record, "bf16", PAGES * PAGE, 7), ids, default_rule(record))
    # Requests of 6, 0, 7 and 3 rows; a page given back, one past the pool, and a table that ends too early.
    table = torch.tensor([[2, PAGES, 1], [0, 0, 0], [1, -1, 2], [0, 1, 0]], dtype=torch.int32)
    starts = torch.tensor([1, 7, 7, 14, 17], dtype=torch.int32)
    first = torch.tensor([3, 0, 11, -1], dtype=torch.int32) if with_starts else None
    slots = table_slots(table, starts, first, PAGE, 19)
    assert bool((slots < 0).any()) and bool((slots >= PAGES * PAGE).any()) and int((slots >= 0).sum()) > 8
    found = read(
        kernel("read", "sm_90a", kv=format_id), record, caches, 19,
        block_table=table, row_starts=starts, token_starts=first,
    )  # fmt: skip
    torch.testing.assert_close(found, read_reference(record, caches, slots), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("record", [r for r in KV_FORMATS.values() if other_layout(r)], ids=lambda r: r.format_id)
@pytest.mark.parametrize("listed", [False, True])
def test_tokens_move_between_layouts(record: KvFormat, listed: bool) -> None:
    other = other_layout(record)
    assert other is not None and other_layout(other) is record
    source = allocate_cache(other, 4, 3, "cpu")
    (pool,) = source.values()
    pool.view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    target = allocate_cache(record, PAGES, PAGE, "cpu", extra_bytes=96)
    wanted = copied(target)
    slots = torch.arange(12), torch.arange(12)
    if listed:
        slots = torch.tensor([3, -1, 11, 12, 0, 5]), torch.tensor([14, 2, 0, 1, -1, PAGES * PAGE])
    select = kernel("convert", "sm_90a", **{"from": other.format_id, "to": record.format_id})
    convert(select, source, target, slots if listed else None)
    convert_reference(other, source, record, wanted, *slots)
    assert same_bytes(target, wanted)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("format_id", ["v32", "v4", "v41_page_split"])
def test_pools_past_32_bits_of_bytes(format_id: str, arch: str) -> None:
    """Pages 2^33 B apart of which only the last one exists, where its stride puts it."""
    record, rule, far = kv_format(format_id), default_rule(kv_format(format_id)), 1 << 33
    (page,) = allocate_cache(record, 1, PAGE, "cpu").values()
    wanted = {"k_cache": page.clone(memory_format=torch.preserve_format)}
    x, rows = rows_of(record, "bf16", 8, 2)[:4], torch.tensor([2, 0, 4, 1])
    for role in ("write", "read"):
        memory = Memory()
        base = 1 << 40
        out = torch.zeros(4, record.d_qk, dtype=torch.bfloat16)
        slots = 2 * PAGE + rows
        shared = {
            **pool_arguments(record, {"k_cache": page}, Memory(), writable=True),
            "cache": base, "page_stride_bytes": far, "pool_tokens": 3 * PAGE, "rows_count": 4, "slots_wide": 1,
        }  # fmt: skip
        memory.add("page", storage(page), address=base + 2 * far)
        shared["slots"] = memory.add("slots", slots, writable=False)
        if role == "write":
            axes = {"kv": format_id, "rule": rule, "rows": "bf16"}
            own = {"rows": memory.add("rows", x), "row_stride": x.stride(0), "k_pe": 0, "k_pe_stride": 0}
        else:
            axes = {"kv": format_id}
            own = dict.fromkeys(
                ("table_stride", "table_columns", "requests", "block_table", "row_starts", "token_starts"), 0
            ) | {"out": memory.add("out", out), "out_stride": out.stride(0)}
        kernel(role, arch, **axes).launch(1, {**shared, **own}, memory)
    write_reference(record, wanted, x, rows, rule)
    assert torch.equal(page.view(torch.uint8), wanted["k_cache"].view(torch.uint8))
    torch.testing.assert_close(out, read_reference(record, wanted, rows), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["v32_kv_cache_h128", "v4_kv_cache_h64", "v41_kv_cache_h64", "glm5_nope_kv_cache_h64"])
def test_the_check_passes(name: str) -> None:
    """The quick tier but for graphs, as a device would run it."""
    spec = load_spec(name)
    cases = [case for case in kv_cases(spec, "quick") if case.probe is not Probe.GRAPH]
    kernels = KernelCache(spec, torch.device("cpu"), lambda own, device: EmulatedCaches(own, "sm_90a"))
    results = run_cases(cases, kernels, torch.device("cpu"), seed=5)
    assert [(r.name, r.problem) for r in results if r.status != "passed"] == []
    assert len(results) > 40
