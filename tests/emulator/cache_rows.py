"""Cache ops on the emulator: pools full of poison, kernels as the build compiles them, every byte compared."""

from __future__ import annotations

from functools import cache

import torch
from decode import Kernel
from ptx_texts import ptx_of

from dsagen.division import page_divisor
from dsagen.emulator import Memory
from dsagen.families.kv_cache.family import BODY, FAMILY, NAME
from dsagen.families.kv_cache.geometry import other_layout
from dsagen.families.kv_cache.op import RowsShape
from dsagen.kv_format import KvFormat
from dsagen.plan import Variant
from dsagen.spec import DeploymentSpec

Caches = dict[str, torch.Tensor]


@cache
def kernel(role: str, arch: str, **axes: str) -> Kernel:
    plan = FAMILY.plan(Variant(NAME, role, BODY, arch, tuple(axes.items())))
    return Kernel(plan, ptx_of(plan))


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def copied(caches: Caches) -> Caches:
    """The same pools over storages of their own, padding included."""
    copies = {}
    for name, pool in caches.items():
        data = storage(pool).clone().view(pool.dtype)
        copies[name] = data.as_strided(pool.shape, pool.stride(), pool.storage_offset())
    return copies


def same_bytes(a: Caches, b: Caches) -> bool:
    return all(torch.equal(storage(a[name]), storage(b[name])) for name in a)


def placed(name: str, tensor: torch.Tensor, memory: Memory, writable: bool = True) -> int:
    """Address of a tensor's first element, its whole storage being there."""
    return memory.add(name, storage(tensor), writable=writable) + tensor.storage_offset() * tensor.element_size()


def pool_arguments(
    record: KvFormat, caches: Caches, memory: Memory, writable: bool, page_stride_bytes: int | None = None
) -> dict[str, int]:
    """Arguments of a pool; with a `page_stride_bytes` its pages lie so far apart, with nothing in between."""
    values = caches[record.segment("values").tensor]
    pages, page_size = values.shape[:2]
    multiplier, shift = page_divisor(page_size)
    arguments = {
        "pool_tokens": pages * page_size, "page_size": page_size,
        "page_multiplier": multiplier, "page_shift": shift, "rope_cache": 0, "rope_page_stride_bytes": 0,
    }  # fmt: skip
    for member, name in zip(("cache", "rope_cache"), caches, strict=False):
        pool = caches[name]
        stride = "page_stride_bytes" if member == "cache" else "rope_page_stride_bytes"
        arguments[member] = memory.add(name, storage(pool), writable=writable)
        arguments[stride] = pool.stride(0) * pool.element_size()
        if page_stride_bytes is not None:
            arguments |= {member: _spread_pages(name, pool, memory, page_stride_bytes), stride: page_stride_bytes}
    return arguments


def _spread_pages(name: str, pool: torch.Tensor, memory: Memory, stride_bytes: int) -> int:
    base = 1 << 40
    for number, page in enumerate(storage(pool).chunk(len(pool))):
        memory.add(f"page {number} of {name}", page, address=base + number * stride_bytes)
    return base


def write(
    select: Kernel, record: KvFormat, caches: Caches, rows: torch.Tensor, slots: torch.Tensor,
    k_pe: torch.Tensor | None = None, seed: int = 0, page_stride_bytes: int | None = None,
) -> None:  # fmt: skip
    memory = Memory()
    arguments = {
        "rows": placed("rows", rows, memory, writable=False),
        "row_stride": rows.stride(0),
        "k_pe": 0 if k_pe is None else placed("k_pe", k_pe, memory, writable=False),
        "k_pe_stride": 0 if k_pe is None else k_pe.stride(0),
        "slots": memory.add("slots", slots, writable=False), "slots_wide": int(slots.dtype is torch.int64),
        "rows_count": rows.shape[0], **pool_arguments(record, caches, memory, True, page_stride_bytes),
    }  # fmt: skip
    select.launch(RowsShape(rows.shape[0]).blocks, arguments, memory, seed)


def read(
    select: Kernel, record: KvFormat, caches: Caches, rows: int, slots: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, row_starts: torch.Tensor | None = None,
    token_starts: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows, in `out` or from the middle of wider ones that must stay as they are."""
    memory = Memory()
    wide = torch.full((rows, record.d_qk + 16), -7.0, dtype=torch.bfloat16) if out is None else out
    lists = {"slots": slots, "block_table": block_table, "row_starts": row_starts, "token_starts": token_starts}
    arguments = {
        name: 0 if tensor is None else memory.add(name, tensor, writable=False) for name, tensor in lists.items()
    } | {
        "out": placed("out", wide, memory), "out_stride": wide.stride(0), "rows_count": rows,
        "slots_wide": int(slots is not None and slots.dtype is torch.int64),
        "table_stride": 0 if block_table is None else block_table.stride(0),
        "table_columns": 0 if block_table is None else block_table.shape[1],
        "requests": 0 if block_table is None else block_table.shape[0],
        **pool_arguments(record, caches, memory, writable=False),
    }  # fmt: skip
    select.launch(RowsShape(rows).blocks, arguments, memory)
    if out is not None:
        return out
    assert (wide[:, record.d_qk :] == -7.0).all(), "wrote behind a row"
    return wide[:, : record.d_qk]


def convert(
    select: Kernel, source: Caches, target: Caches, slots: tuple[torch.Tensor, torch.Tensor] | None = None
) -> None:
    memory = Memory()
    (source_pool,), (target_pool,) = source.values(), target.values()
    count = source_pool.shape[0] * source_pool.shape[1] if slots is None else len(slots[0])
    arguments = {"rows_count": count}
    for name, pool, index in (("source", source_pool, 0), ("target", target_pool, 1)):
        given = None if slots is None else slots[index]
        multiplier, shift = page_divisor(pool.shape[1])
        arguments |= {
            name: memory.add(name, storage(pool), writable=name == "target"),
            f"{name}_stride_bytes": pool.stride(0) * pool.element_size(),
            f"{name}_slots": 0 if given is None else memory.add(f"{name}_slots", given, writable=False),
            f"{name}_wide": int(given is not None and given.dtype is torch.int64),
            f"{name}_tokens": pool.shape[0] * pool.shape[1], f"{name}_page_size": pool.shape[1],
            f"{name}_multiplier": multiplier, f"{name}_shift": shift,
        }  # fmt: skip
    select.launch(RowsShape(count).blocks, arguments, memory)


class EmulatedCaches:
    """A spec's cache ops with the runtime's signatures, for the cases of the check."""

    def __init__(self, spec: DeploymentSpec, arch: str) -> None:
        self.spec, self.arch = spec, arch

    def prepare(self) -> None:
        pass

    def kv_write(self, rows, k_cache, slots, *, k_pe=None, kpe_cache=None, extra=False):  # type: ignore[no-untyped-def]
        record, caches = self._caches(k_cache, kpe_cache, extra)
        how = self.spec.kv_write
        assert how is not None
        rule = str(how.extra_rule if extra else how.rule)
        select = kernel("write", self.arch, kv=record.format_id, rule=rule, rows=how.rows)
        write(select, record, caches, rows, slots, k_pe)

    def kv_read(self, k_cache, *, out, slots=None, rows=None, kpe_cache=None, extra=False, **table):  # type: ignore[no-untyped-def]
        record, caches = self._caches(k_cache, kpe_cache, extra)
        count = len(slots) if rows is None else rows
        return read(kernel("read", self.arch, kv=record.format_id), record, caches, count, slots, out=out, **table)

    def kv_convert(self, source, target, *, source_slots, target_slots, extra=False):  # type: ignore[no-untyped-def]
        record, caches = self._caches(target, None, extra)
        other = other_layout(record)
        assert other is not None
        select = kernel("convert", self.arch, **{"from": other.format_id, "to": record.format_id})
        convert(select, {"k_cache": source}, caches, (source_slots, target_slots))

    def _caches(self, k_cache: torch.Tensor, kpe_cache: torch.Tensor | None, extra: bool) -> tuple[KvFormat, Caches]:
        record = self.spec.extra_kv_format if extra else self.spec.kv_format
        assert record is not None
        pools = [k_cache] if kpe_cache is None else [k_cache, kpe_cache]
        return record, dict(zip((tensor.name for tensor in record.tensors), pools, strict=True))
