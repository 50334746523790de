"""The index cache's kernels as nvcc compiles them, on the emulator, held byte for byte to the torch reference."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from index_rows import EmulatedIndexCache, kernels_of, problem, spec_of
from planted import a_race, faulty, said

import dsagen
from dsagen.check.cache_inputs import PoolShape, copy_of, whole
from dsagen.check.index_cases import Action, IndexCacheCase
from dsagen.check.index_run import poisoned_cache
from dsagen.check.kv_cases import Contents
from dsagen.check.scalar_rule import scalar_code
from dsagen.dtype import E2M1
from dsagen.errors import EmulatorError
from dsagen.families.index_cache.reference import quantise_keys, write_reference
from dsagen.families.indexer_logits.model_reference import STYLES, index_keys, index_queries, rope_angles
from dsagen.families.indexer_logits.reference import logits_reference
from dsagen.index_format import INDEX_FORMATS, index_format
from dsagen.index_rule import index_rule, index_rules_of

pytestmark = pytest.mark.compile

VECTORS = Path(__file__).parents[1] / "vectors"
# Every rule of every format, and of each format by one rule another width, dtype or arch: each kernel structure.
KERNELS = [
    (name, 128, rule, "bf16", "sm_90a") for name, record in INDEX_FORMATS.items() for rule in index_rules_of(record)
]
KERNELS += [
    ("mxfp4", 32, "pow2_amax_floor_ties_down", "fp32", "sm_90a"),
    ("fp8", 128, "pow2_amax_floor", "bf16", "sm_80"),
    ("mxfp8", 64, "pow2_amax_floor", "fp16", "sm_120a"),
]  # fmt: skip
CONTENTS = [IndexCacheCase(f"index.{c}", Action.WRITE, 50, 20, contents=c, pad_bytes=4) for c in Contents]
# Stores of 16 bytes; then few keys, fewer slots than keys, and int32 slots.
WIDE = IndexCacheCase("index.wide", Action.WRITE, 150, 11, 16, 64)
SPARE = IndexCacheCase("index.spare", Action.WRITE, 19, 5, 7, spare_keys=4, wide_slots=False)
GATHER = IndexCacheCase("index.gather", Action.GATHER, 90, 20, strided=True)
GATHERS = (GATHER, replace(GATHER, page_size=16, pad_bytes=64, strided=False))


@pytest.mark.parametrize(("keys", "dim", "rule", "rows", "arch"), KERNELS)
def test_every_structure(keys: str, dim: int, rule: str, rows: str, arch: str) -> None:
    spec = spec_of(keys, dim, rule, rows, arch)
    kernels = EmulatedIndexCache.of(spec, seed=dim, schedule="random")
    for case in (*CONTENTS, WIDE, SPARE, *GATHERS):
        assert problem(case, kernels) == "", case.name


@pytest.mark.parametrize(
    ("name", "keys", "rule"),
    [
        ("fp8_raw", "fp8", "amax_floor"),
        ("fp8_raw", "fp8", "amax_floor_reciprocal"),
        ("fp8_pow2", "fp8", "pow2_amax_floor"),
        ("fp8_mx", "mxfp8", "pow2_amax_floor"),
        ("mxfp4_june", "mxfp4", "pow2_amax_floor_ties_down"),
        ("mxfp4_sept", "mxfp4", "pow2_amax_floor"),
    ],
)
def test_golden_caches_are_written(name: str, keys: str, rule: str) -> None:
    with np.load(VECTORS / f"index_{name}.npz") as data:
        want, page_size = torch.from_numpy(data["pool"]), int(data["page_size"])
        x = torch.from_numpy(data["x_bf16"].view(np.int16)).view(torch.bfloat16).flatten(0, 1).clone()
    size = index_format(keys).record_bytes(128)
    pool = torch.full_like(want, 0xFF)
    cache = pool.as_strided((len(pool), page_size, 1, size), (pool.stride(0), size, size, 1))
    EmulatedIndexCache.of(spec_of(keys, rule=rule)).index_write(x, cache, torch.arange(len(x)))
    assert pool.equal(want)


@pytest.mark.parametrize("rule_id", ["pow2_amax_floor", "pow2_amax_floor_ties_down"])
def test_every_boundary_between_fp4_codes(rule_id: str) -> None:
    """Keys whose first dim is the largest number: their scale is 1, so codes are of the dims themselves."""
    record, rule = index_format("mxfp4"), index_rule(index_format("mxfp4"), rule_id)
    sizes = np.float32([E2M1.decode(code) for code in range(8)])
    middles = (sizes[1:] + sizes[:-1]) / 2
    around = [sizes, middles, np.nextafter(middles, np.float32(9)), np.nextafter(middles, np.float32(0))]
    points = np.concatenate([*around, np.float32([2.0**-149, 1e-30])])
    points = torch.from_numpy(np.concatenate([points, -points]))
    x = torch.zeros(-(-len(points) // 31), 32)
    x[:, 0] = 6.0
    x[:, 1:] = torch.nn.functional.pad(points, (0, x[:, 1:].numel() - len(points))).view(-1, 31)
    cache = poisoned_cache(record, 32, PoolShape(1, len(x)), 0, "cpu")
    kernels = EmulatedIndexCache.of(spec_of("mxfp4", 32, rule_id, "fp32"))
    kernels.index_write(x, cache, torch.arange(len(x)))
    data = whole(cache)
    for key, row in enumerate(x.tolist()):
        codes = [code for byte in data[16 * key : 16 * key + 16].tolist() for code in (byte & 15, byte >> 4)]
        assert codes == [scalar_code(rule, value) for value in row]
    assert data[16 * len(x) :].view(-1, 4).tolist() == [[127] * 4] * len(x)


def test_what_is_written_is_what_is_scored() -> None:
    """A model's projections through the writer and the logits, two kernels of one spec, beside the references."""
    ops = {"ops": ["indexer_logits", "index_cache"], "index": {"heads": 16}}
    kernels = dsagen.load({"model": "v32", "heads": 16, "archs": ["sm_90a"], **ops}, device="emulator")
    record, style, count = index_format("fp8"), STYLES["v32"], 30
    generator = torch.Generator().manual_seed(3)
    x, q = (torch.randn(*shape, 128, generator=generator).bfloat16() for shape in ((count,), (2, 16)))
    angles, weights = rope_angles(torch.arange(count), 64, 1e4), torch.randn(2, 16, generator=generator)
    keys = index_keys(style, x, angles, torch.ones(128), torch.zeros(128))
    queries = index_queries(style, record, "pow2_amax_floor", q, angles[-2:], weights)
    cache = poisoned_cache(record, 128, PoolShape(6, 7), 12, "cpu")
    table, lens = torch.tensor([[4, 0, 5, 2, 1]], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    position = torch.arange(count)
    kernels.index_write(keys, cache, table[0, position // 7] * 7 + position % 7)
    call = queries.codes.view(1, 2, 16, 128), cache, queries.weights, lens, table
    scores = kernels.indexer_logits(*call, max_seq_len=count, fill_neg_inf=True)
    q8 = call[0].view(torch.float8_e4m3fn)
    want, scored = logits_reference(q8, *call[1:], record, count)
    assert int(scored.sum()) == 2 * count - 1 and want[scored].isfinite().all()
    torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-6)
    codes, scales = kernels.index_gather(cache, table, torch.tensor([0, count], dtype=torch.int32), count)
    stored, words = quantise_keys(record, keys, "pow2_amax_floor")
    assert codes.view(torch.uint8).equal(stored) and scales.equal(words.view(torch.float32).squeeze(1))


@pytest.mark.parametrize("action", Action)
def test_pools_past_32_bits_of_bytes(action: Action) -> None:
    kernels = EmulatedIndexCache.of(spec_of("fp8"), far=1 << 33)
    assert problem(IndexCacheCase("index.far", action, 20, 4, 5), kernels) == ""


# ---- planted faults --------------------------------------------------------------------------------------------------

SHAPE = PoolShape(3, 5)
ROWS = torch.randn(7, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
# A key each, but for one that is skipped and one just past the pool.
SLOTS = torch.tensor([3, -1, 14, 7, 0, SHAPE.tokens, 11])


def pool(keys: str = "fp8") -> torch.Tensor:
    return poisoned_cache(index_format(keys), 128, SHAPE, 0, "cpu")


def wrong(role: str, *places: str, keys: str = "fp8") -> EmulatedIndexCache:
    spec = spec_of(keys)
    right = kernels_of(spec)
    return EmulatedIndexCache(spec, {**right, role: faulty(right[role], *places)})


def test_a_slot_out_of_bounds() -> None:
    message = said(lambda: wrong("write", "const bool live = pages.holds(slot);", "const bool live = slot >= 0;")
                   .index_write(ROWS, pool(), SLOTS))  # fmt: skip
    assert re.search(r"write of \d+ bytes at global address \w+: \d+ bytes \w+ .*buffer", message)


def test_lanes_without_a_slot_that_leave_before_the_shuffles() -> None:
    kernels = wrong("write", "float x[kPieceDims] = {};", "if (!live) return;\n    float x[kPieceDims] = {};")
    with pytest.raises(EmulatorError, match=r"deadlock in CTA \(0, 0, 0\).*\n.* wait for other lanes of the warp"):
        kernels.index_write(ROWS, pool(), SLOTS)


def test_stores_of_16_bytes_where_pages_start_at_4() -> None:
    kernels = wrong("write", "words, p.wide_pages != 0);", "words, true);")
    message = said(lambda: kernels.index_write(ROWS, pool(), SLOTS))
    assert re.search(r"write of 16 bytes at global address \w+: misaligned", message)


def test_blocks_that_take_the_same_keys() -> None:
    kernels = wrong("write", "static_cast<i64>(ptx::block_index()) * kKeys + thread / kLanes;", "thread / kLanes;")
    many, slots = torch.randn(30, 128).bfloat16(), torch.arange(30) % SHAPE.tokens
    slots[SHAPE.tokens :] = -1
    message = said(lambda: kernels.index_write(many, pool(), slots))
    assert a_race(message, r"bytes \d+ to \d+ of buffer k_cache")


@pytest.mark.parametrize(
    ("keys", "places"),
    [
        ("fp8", ("for (int mask = 1; mask < kScaleLanes; mask *= 2)", "for (int mask = 1; mask < 2; mask *= 2)")),
        ("mxfp4", ("(word >> 23 & 0xff) << (piece / kScaleLanes * 8)", "(word >> 23 & 0xff) << (piece % 4 * 8)")),
        ("mxfp4", ("return (nearest & 7) == 0 ? 0 : nearest;", "return nearest;")),
    ],
)
def test_wrong_bytes_are_noticed(keys: str, places: tuple[str, str]) -> None:
    kernels = wrong("write", *places, keys=keys)
    assert any(problem(case, kernels) for case in CONTENTS)


def test_rows_without_a_key_that_are_not_zeroed() -> None:
    kernels = wrong("gather", "Words4 codes{0, 0, 0, 0};", "Words4 codes{1, 0, 0, 0};")
    assert problem(GATHER, kernels).startswith("codes: byte ")


def test_a_column_past_the_block_table() -> None:
    kernels = wrong("gather", "if (column >= static_cast<u32>(p.table_columns)) return kNone;", "")
    # Eleven rows, one more than the table has keys for.
    table, starts = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([0, 11], dtype=torch.int32)
    outputs = {"codes": torch.ones(11, 128, dtype=torch.uint8), "scales": torch.ones(11), "token_starts": None}
    right = EmulatedIndexCache.of(spec_of("fp8"))
    right.index_gather(pool(), table, starts, 11, **outputs)
    assert not outputs["codes"][10].any() and outputs["codes"][9].all()
    message = said(lambda: kernels.index_gather(pool(), table, starts, 11, **outputs))
    assert re.search(r"read of 4 bytes .* 0 bytes past the end of buffer block_table", message)


def test_nothing_but_the_slots_is_written() -> None:
    cache = pool("mxfp4")
    want = copy_of(cache)
    EmulatedIndexCache.of(spec_of("mxfp4")).index_write(ROWS, cache, SLOTS)
    write_reference(index_format("mxfp4"), want, ROWS, SLOTS, "pow2_amax_floor")
    assert whole(cache).equal(whole(want))
