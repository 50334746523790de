"""Sparse decode on the emulator: kernels as the build compiles them, inputs and gates of the conformance check."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from ptx_texts import ptx_of

from dsagen import emulator
from dsagen.arch import arch as arch_row
from dsagen.check.cases import DecodeCase
from dsagen.check.compare import compare_decode
from dsagen.check.inputs import DecodeInputs, make_inputs
from dsagen.check.probes import gates_for
from dsagen.emulator import Counts, Memory
from dsagen.families.sparse_decode.family import FAMILY, NAME, plan_main
from dsagen.families.sparse_decode.op import DecodeShape, partition
from dsagen.families.sparse_decode.reference import DecodeReference, Source, sparse_decode_reference
from dsagen.kv_format import kv_format
from dsagen.plan import KernelPlan, Variant
from dsagen.runtime.decode_caches import SecondTensors, pool_addresses, pool_arguments

PARTIALS = ("lse_accum", "o_accum")
_PACK = {"pointer": "Q", "u64": "Q", "i64": "q", "u32": "I", "i32": "i", "f32": "f"}


@dataclass(frozen=True)
class Kernel:
    """A plan with the PTX that nvcc makes of it, perhaps with one u32 argument more than the plan's, `choice`."""

    plan: KernelPlan
    ptx: str
    choice: int | None = None

    def launch(
        self,
        grid: int,
        values: Mapping[str, float],
        memory: Memory,
        seed: int = 0,
        schedule: str | None = None,
        cluster: int = 1,
    ) -> Counts:
        block = bytearray(self.plan.params_bytes)
        for field in self.plan.params:
            struct.pack_into("<" + _PACK[field.ctype], block, field.offset_bytes, values[field.name])
        if self.choice is not None:
            block += struct.pack("<I", self.choice)
        plan = self.plan
        return emulator.launch(
            self.ptx, plan.symbol, grid, plan.threads, bytes(block), plan.smem_bytes, memory,
            seed=seed, schedule=schedule, os_threads=2, instruction_limit=1 << 24, cluster=cluster,
        )  # fmt: skip


@cache
def main_kernel(fmt: str, heads_n: int, arch: str, body: str = "mma_sync", extra: str | None = None) -> Kernel:
    record = kv_format(fmt)
    axes = (
        ("kv", fmt),
        *(() if extra is None else (("xkv", extra),)),
        ("dqk", record.d_qk),
        ("dv", record.d_v),
        ("n", heads_n),
        ("smem", arch_row(arch).smem_class),
    )
    plan = plan_main(Variant(NAME, "main", body, arch, axes))
    return Kernel(plan, ptx_of(plan))


@cache
def combine_kernel(d_v: int, arch: str) -> Kernel:
    plan = FAMILY.plan(Variant(NAME, "combine", "portable", arch, (("dv", d_v),)))
    return Kernel(plan, ptx_of(plan))


@cache
def inputs_of(case: DecodeCase, fmt: str, heads: int, extra: str | None = None) -> DecodeInputs:
    generator = torch.Generator().manual_seed(11)
    other = None if extra is None else kv_format(extra)
    return make_inputs(case, kv_format(fmt), heads, torch.device("cpu"), generator, other)


@cache
def reference_of(case: DecodeCase, fmt: str, heads: int, extra: str | None = None) -> DecodeReference:
    inputs = inputs_of(case, fmt, heads, extra)
    return sparse_decode_reference(
        inputs.q, inputs.record, inputs.caches, inputs.indices, sm_scale=inputs.sm_scale,
        topk_length=inputs.topk_length, attn_sink=inputs.attn_sink, extra=inputs.extra,
        with_spread=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Results of a call, bf16 out [b, s_q, h, d_v] and fp32 lse [b, h, s_q], and what the main kernel did."""

    out: torch.Tensor
    lse: torch.Tensor
    counts: Counts


def run(
    case: DecodeCase,
    fmt: str,
    heads: int,
    arch: str,
    splits: int = 1,
    seed: int = 0,
    main: Kernel | None = None,
    combine: Kernel | None = None,
    schedule: str | None = None,
    page_stride_bytes: int | None = None,
    extra: str | None = None,
    joins: bool = False,
) -> Run:
    """Main and, for several splits, combine, unless they are to be joined in the main kernel, as a cluster.

    `main` and `combine` replace the kernels that would be compiled. With a `page_stride_bytes` the cache's pages lie so
    far apart, with nothing in between. `extra` is the format of the second cache, for a case that has one.
    """
    record = kv_format(fmt)
    inputs = inputs_of(case, fmt, heads, extra)
    main = main or main_kernel(fmt, heads, arch)
    shape = DecodeShape(case.batch, case.s_q, heads, case.topk, case.extra_topk)
    part = partition(shape, main.plan, 132, "off", splits, joins)
    memory = Memory()
    out = torch.full((case.batch, case.s_q, heads, record.d_v), math.nan, dtype=torch.bfloat16)
    lse = torch.full((case.batch, case.s_q, heads), math.nan)
    values: dict[str, float] = {
        "s_q": case.s_q, "heads": heads, "num_splits": splits,
        "out": memory.add("out", out, initialised=False), **_strides("out", out),
        "lse": memory.add("lse", lse, initialised=False),
        "lse_stride_b": lse.stride(0), "lse_stride_s": lse.stride(1), "lse_stride_h": 1,
        "attn_sink": 0 if inputs.attn_sink is None else memory.add("attn_sink", inputs.attn_sink, writable=False),
        "lse_unit": math.log(2), "empty_lse": math.inf, "lse_accum": 0, "o_accum": 0,
    }  # fmt: skip
    if part.combine_ctas:
        partials = (
            torch.full((part.rows, splits, heads), math.nan),
            torch.full((part.rows, splits, heads, record.d_v), math.nan),
        )
        values |= {name: memory.add(name, t, initialised=False) for name, t in zip(PARTIALS, partials, strict=True)}
    arguments = {
        **values,
        "q": memory.add("q", _base(inputs.q), writable=False), **_strides("q", inputs.q),
        "head_groups": part.head_groups, "group_heads": part.group_heads,
        "scale_log2": inputs.sm_scale * math.log2(math.e),
    }  # fmt: skip
    for prefix, source in zip(("", "extra_"), inputs.sources, strict=False):
        arguments |= _place_source(memory, prefix, source)
    if page_stride_bytes is not None:
        arguments |= _spread_pages(memory, *inputs.caches.values(), stride=page_stride_bytes)
    counts = main.launch(part.main_ctas, arguments, memory, seed, schedule, part.cluster)
    if part.combine_ctas:
        combine = combine or combine_kernel(record.d_v, arch)
        overlaps = combine.plan.overlaps_previous
        combine.launch(part.combine_ctas, values, memory.after(*PARTIALS) if overlaps else memory, seed, schedule)
    return Run(out, lse, counts)


def _place_source(memory: Memory, prefix: str, source: Source) -> dict[str, float]:
    """Arguments of a cache and of the lists that select from it."""
    caches, indices, lengths = tuple(source.caches.values()), source.indices, source.topk_length
    k_cache, *others = caches
    second = SecondTensors(**{n: cache for n, cache in source.caches.items() if n in SecondTensors._fields})
    placed = {cache.data_ptr(): memory.add(f"{prefix}{name}", _base(cache), writable=False)
              for name, cache in source.caches.items()}  # fmt: skip
    host = pool_addresses(prefix, source.record, k_cache, second)
    of_part = (others[0] if others else k_cache).data_ptr()
    starts = {f"{prefix}kv": k_cache.data_ptr(), f"{prefix}kv_part": of_part}
    return {
        **pool_arguments(prefix, source.record, k_cache, second),
        **{name: placed[starts[name]] + int(address) - starts[name] for name, address in host.items()},
        f"{prefix}topk": indices.shape[2],
        f"{prefix}indices": memory.add(f"{prefix}indices", _base(indices), writable=False),
        f"{prefix}indices_stride_b": indices.stride(0), f"{prefix}indices_stride_s": indices.stride(1),
        f"{prefix}topk_length":
            0 if lengths is None else memory.add(f"{prefix}topk_length", lengths.contiguous(), writable=False),
        f"{prefix}length_stride_b": 0 if lengths is None else lengths.contiguous().stride(0),
        f"{prefix}length_stride_s": 0 if lengths is None or lengths.dim() == 1 else 1,
    }  # fmt: skip


def _spread_pages(memory: Memory, pool: torch.Tensor, stride: int) -> dict[str, int]:
    """Arguments of a cache whose pages lie so far apart."""
    base = 1 << 40
    for number, page in enumerate(pool):
        memory.add(f"page {number}", page.contiguous(), writable=False, address=base + number * stride)
    return {"kv": base, "page_stride_bytes": stride}


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage from its first element on."""
    data = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(data)[start:]


def _strides(name: str, tensor: torch.Tensor) -> dict[str, int]:
    return {f"{name}_stride_{axis}": tensor.stride(n) for n, axis in enumerate("bsh")}


def problem(case: DecodeCase, fmt: str, found: Run, extra: str | None = None) -> str:
    """What is wrong with the results, empty when nothing is."""
    record = kv_format(fmt)
    want = reference_of(case, fmt, found.out.shape[2], extra)
    rows = case.batch * case.s_q
    out, lse = found.out.reshape(rows, -1, record.d_v), found.lse.reshape(rows, -1)
    gates = gates_for(case.values, want.peak)
    return compare_decode(out, lse, want.out, want.lse, record.scale_group_dims or 128, gates, want.spread).problem
