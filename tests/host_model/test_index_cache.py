"""The index cache's kernels on the CPU: golden bytes written, gathered again, and nothing beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from host import COMPILER, HostKernel, Memory

from dsagen.arch import arch as arch_row
from dsagen.division import page_divisor
from dsagen.families.index_cache.family import FAMILY
from dsagen.families.index_cache.op import blocks_for
from dsagen.spec import load_spec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

VECTORS = Path(__file__).parents[1] / "vectors"
# Golden file, format and rule, arch: codes by the conversion and by integers, ties of FP4 down.
CASES = [
    ("fp8_raw", "fp8", "amax_floor_reciprocal", "sm_90a"),
    ("fp8_mx", "mxfp8", "pow2_amax_floor", "sm_80"),
    ("mxfp4_june", "mxfp4", "pow2_amax_floor_ties_down", "sm_90a"),
]


@pytest.mark.parametrize(("name", "keys", "rule", "arch"), CASES)
def test_golden_keys_are_written_and_gathered(name: str, keys: str, rule: str, arch: str) -> None:
    with np.load(VECTORS / f"index_{name}.npz") as data:
        wanted, page_size = data["pool"], int(data["page_size"])
        x = data["x_bf16"].reshape(-1, 128)
    index, write = {"heads": 8, "dim": 128, "keys": keys}, {"rows": "bf16", "rule": rule}
    spec = load_spec("v32_index_cache_h128").replace(archs=[arch], index=index, index_write=write)
    plans = {cell.role: FAMILY.plan(cell.variant) for cell in FAMILY.expand(spec, arch_row(arch)) if cell.variant}
    # Keys in reverse, each at the slot that it has in the file, and one without any.
    slots = np.append(np.arange(len(x), dtype=np.int64)[::-1], -1)
    memory = Memory()
    pool = memory.output("k_cache", wanted.shape, np.uint8)
    pool[...] = 0xFF
    params = {
        "keys": memory.input("keys", np.ascontiguousarray(np.concatenate([x[::-1], x[:1]]))), "key_stride": 128,
        "slots": memory.input("slots", slots), "slots_wide": 1, "rows_count": len(slots),
        **pool_arguments(pool, page_size),
    }  # fmt: skip
    HostKernel(plans["write"]).launch(blocks_for(plans["write"], len(slots)), params, memory)
    assert np.array_equal(pool, wanted)

    code_bytes = (64 if keys == "mxfp4" else 128) * page_size
    rows, memory = len(x) + 3, Memory()
    codes = memory.output("codes", (rows, code_bytes // page_size), np.uint8)
    scales = memory.output("scales", (rows,), np.uint32)
    params = {
        "codes": codes, "code_stride_bytes": codes.shape[1], "scales": scales, "scale_stride_bytes": 4,
        "rows_count": rows, "block_table": memory.input("block_table", np.zeros((1, 2), np.int32)), "table_stride": 2,
        "table_columns": 1, "requests": 1, "row_starts": memory.input("row_starts", np.array([2, rows], np.int32)),
        "token_starts": None, **pool_arguments(memory.input("pool", wanted), page_size),
    }  # fmt: skip
    HostKernel(plans["gather"]).launch(blocks_for(plans["gather"], rows), params, memory)
    # Two rows before the request's, and one behind what its one page holds.
    held = slice(2, 2 + page_size)
    assert np.array_equal(codes[held].reshape(-1), wanted[0, :code_bytes])
    assert np.array_equal(scales[held], wanted[0, code_bytes : code_bytes + 4 * page_size].view(np.uint32))
    assert not codes[:2].any() and not codes[-1].any() and not scales[:2].any() and not scales[-1]


def pool_arguments(pool: np.ndarray, page_size: int) -> dict[str, object]:
    multiplier, shift = page_divisor(page_size)
    return {
        "cache": pool, "page_stride_bytes": pool.shape[1], "pool_tokens": len(pool) * page_size,
        "page_size": page_size, "page_multiplier": multiplier, "page_shift": shift, "wide_pages": 0,
    }  # fmt: skip
