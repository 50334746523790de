"""Cache calls on the host model: launches as the runtime makes them, over pools whose every byte is compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from host import HostKernel, Memory

from dsagen.division import page_divisor
from dsagen.families.kv_cache.family import BODY, FAMILY, NAME
from dsagen.families.kv_cache.op import RowsShape
from dsagen.kv_format import KvFormat
from dsagen.plan import Variant

GAP = 8  # elements behind each row


@cache
def kernel(role: str, arch: str, **axes: str) -> HostKernel:
    return HostKernel(FAMILY.plan(Variant(NAME, role, BODY, arch, tuple(axes.items()))))


@dataclass(frozen=True)
class Pool:
    """Pools of a cache by tensor name, uint8 [pages, page stride], and tokens of a page."""

    record: KvFormat
    page_size: int
    bytes_of: dict[str, np.ndarray]

    @property
    def tokens(self) -> int:
        return len(next(iter(self.bytes_of.values()))) * self.page_size

    @classmethod
    def poisoned(cls, record: KvFormat, pages: int, page_size: int, extra_bytes: int = 48) -> Pool:
        """0xFF in even pages, 0x7F in odd ones."""
        pools = {}
        for tensor in record.tensors:
            stride = record.default_page_stride_bytes(page_size, tensor.name) + extra_bytes
            pools[tensor.name] = np.where(np.arange(pages)[:, None] % 2, 0x7F, 0xFF).astype(np.uint8).repeat(stride, 1)
        return cls(record, page_size, pools)

    def segment(self, name: str, token: int) -> np.ndarray:
        """A view of a segment's bytes of a token, by the record's own arithmetic."""
        segment = self.record.segment(name)
        pool = self.bytes_of[segment.tensor]
        page, offset = divmod(token, self.page_size)
        first = segment.byte_address(page, offset, 0, self.page_size, pool.shape[1])
        return pool.reshape(-1)[first : first + segment.size_bytes]


def pool_arguments(pool: Pool, placed: dict[str, np.ndarray]) -> dict[str, object]:
    names = list(pool.bytes_of)
    multiplier, shift = page_divisor(pool.page_size)
    rope = placed[names[1]] if len(names) > 1 else None
    return {
        "cache": placed[names[0]],
        "page_stride_bytes": placed[names[0]].shape[1],
        "rope_cache": rope,
        "rope_page_stride_bytes": 0 if rope is None else rope.shape[1],
        "pool_tokens": pool.tokens,
        "page_size": pool.page_size,
        "page_multiplier": multiplier,
        "page_shift": shift,
    }


def write(
    pool: Pool, rule: str, rows: str, x: np.ndarray, slots: np.ndarray, arch: str = "sm_90a", seed: int = 1
) -> Pool:
    """The pools after rows x (bits of their dtype, uint16 or float32) were written. Rows lie in wider ones of NaN."""
    memory = Memory()
    wide = np.full((len(x), x.shape[1] + GAP), -1 if x.dtype == np.uint16 else np.nan).astype(x.dtype)
    wide[:, : x.shape[1]] = x
    placed = {}
    for name, values in pool.bytes_of.items():
        placed[name] = memory.output(name, values.shape, np.uint8)
        placed[name][...] = values
    params = {
        "rows": memory.input("rows", wide),
        "row_stride": wide.shape[1],
        "k_pe": None,
        "k_pe_stride": 0,
        "slots": memory.input("slots", slots),
        "slots_wide": int(slots.dtype == np.int64),
        "rows_count": len(x),
        **pool_arguments(pool, placed),
    }
    run = kernel("write", arch, kv=pool.record.format_id, rule=rule, rows=rows)
    run.launch(RowsShape(len(x)).blocks, params, memory, seed)
    return Pool(pool.record, pool.page_size, {name: values.copy() for name, values in placed.items()})


def read(pool: Pool, slots: np.ndarray, arch: str = "sm_90a") -> np.ndarray:
    """uint16 bits of the bf16 rows of some slots."""
    memory = Memory()
    out = memory.output("out", (len(slots), pool.record.d_qk + GAP), np.uint16)
    placed = {name: memory.input(name, values) for name, values in pool.bytes_of.items()}
    params = {
        "out": out,
        "out_stride": out.shape[1],
        "slots": memory.input("slots", slots),
        "slots_wide": int(slots.dtype == np.int64),
        "rows_count": len(slots),
        "block_table": None,
        "table_stride": 0,
        "table_columns": 0,
        "requests": 0,
        "row_starts": None,
        "token_starts": None,
        **pool_arguments(pool, placed),
    }
    kernel("read", arch, kv=pool.record.format_id).launch(RowsShape(len(slots)).blocks, params, memory)
    assert (out[:, pool.record.d_qk :] == 0xFFFF).all(), "wrote behind a row"
    return out[:, : pool.record.d_qk].copy()


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """bf16 of fp64 values through fp32, each step to nearest even; NaN is 0x7fc0."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def numbers(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
