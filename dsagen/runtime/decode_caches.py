"""The caches of a sparse-decode call: what their tensors must be, and where the kernel finds rows and their parts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsagen.division import page_divisor
from dsagen.errors import GuardError
from dsagen.families.sparse_decode.guards import KV_HEADS_GUARD, POOL_GUARDS, SAME_PAGES_GUARD
from dsagen.families.sparse_decode.rows import part_segments
from dsagen.guard import check
from dsagen.kv_format import KvFormat
from dsagen.runtime.blocks import Number
from dsagen.runtime.pools import Pool, checked_pool


class SecondTensors(NamedTuple):
    """The tensors that some formats have beside k_cache."""

    kpe_cache: torch.Tensor | None = None
    v_cache: torch.Tensor | None = None

    def of(self, record: KvFormat) -> torch.Tensor | None:
        """The one that goes with a format, None for a format of one tensor."""
        return getattr(self, record.tensors[1].name) if len(record.tensors) > 1 else None


# What a format keeps in a tensor of its own.
_CONTENTS = {"kpe_cache": "rotary dims", "v_cache": "values"}


def pool_arguments(
    prefix: str, record: KvFormat, k_cache: torch.Tensor, second: SecondTensors, kv_heads: int = 1
) -> dict[str, Number]:
    """The arguments that a cache's shapes and strides decide, addresses excepted; `prefix` is of their names.

    GuardError for tensors that are not as the format has them.
    """
    values = record.segment("values").tensor
    pool = _pool(f"{prefix}k_cache", k_cache, record, values, kv_heads)
    multiplier, shift = page_divisor(pool.page_size)
    row_bytes = record.cache_tensor(values).io_stride_bytes
    arguments: dict[str, Number] = {
        "page_stride_bytes": pool.page_stride_bytes,
        "row_stride_bytes": pool.token_rows * row_bytes,
        "head_stride_bytes": pool.head_rows * row_bytes,
        "page_multiplier": multiplier,
        "page_shift": shift,
        "page_size": pool.page_size,
        "pool_tokens": pool.tokens,
    }
    for part in part_segments(record):
        parts = pool
        if part.tensor != values:
            parts = _second_tensor(prefix, record, part.tensor, pool, second, kv_heads)
        arguments |= {
            "part_page_stride_bytes": parts.page_stride_bytes,
            "part_row_stride_bytes": parts.token_rows * part.token_stride_bytes,
            "part_head_stride_bytes": parts.head_rows * part.token_stride_bytes,
        }
    names = {tensor.name for tensor in record.tensors}
    for name, tensor in second._asdict().items():
        if tensor is not None and name not in names:
            has = "one tensor" if len(names) == 1 else "another second tensor"
            raise GuardError(f"[T-17] {prefix}{name}: format {record.format_id} has {has}: leave it out")
    return {f"{prefix}{name}": value for name, value in arguments.items()}


def pool_addresses(prefix: str, record: KvFormat, k_cache: torch.Tensor, second: SecondTensors) -> dict[str, Number]:
    """The arguments that a cache's addresses decide."""
    addresses: dict[str, Number] = {f"{prefix}kv": k_cache.data_ptr()}
    for part in part_segments(record):
        other = second.of(record)
        tensor = k_cache if other is None else other
        section = part.section_bytes_per_token * int(k_cache.shape[1] * k_cache.shape[2])
        addresses[f"{prefix}kv_part"] = tensor.data_ptr() + section + part.offset_bytes
    return addresses


def no_pool_arguments(prefix: str, has_part: bool) -> dict[str, Number]:
    """The arguments of a cache that a call leaves out: no token, so that nothing is read."""
    names = ["kv", "page_stride_bytes", "row_stride_bytes", "page_multiplier", "page_shift", "pool_tokens"]
    names.append("head_stride_bytes")
    parts = ("kv_part", "part_page_stride_bytes", "part_row_stride_bytes", "part_head_stride_bytes")
    names += parts if has_part else ()
    arguments: dict[str, Number] = {f"{prefix}{name}": 0 for name in names}
    return {**arguments, f"{prefix}page_size": 1}


def _second_tensor(prefix: str, record: KvFormat, name: str, pool: Pool, second: SecondTensors, kv_heads: int) -> Pool:
    tensor = second.of(record)
    if tensor is None:
        text = f"format {record.format_id} keeps {_CONTENTS[name]} in their own tensor: pass it"
        raise GuardError(f"[T-17] {prefix}{name}: {text}")
    other = _pool(f"{prefix}{name}", tensor, record, name, kv_heads)
    check([SAME_PAGES_GUARD], other.same_pages(pool), name=f"{prefix}{name}", other=f"{prefix}k_cache")
    return other


def _pool(name: str, tensor: torch.Tensor, record: KvFormat, part: str, kv_heads: int) -> Pool:
    return checked_pool(name, tensor, record, record.cache_tensor(part), POOL_GUARDS, kv_heads, KV_HEADS_GUARD)
