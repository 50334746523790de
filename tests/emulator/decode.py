"""Sparse decode on the emulator: kernels as the build compiles them, inputs and gates of the conformance check."""

from __future__ import annotations

import math
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from dsagen import emulator
from dsagen.arch import arch as arch_row
from dsagen.build import find_toolchain
from dsagen.build.key import compile_flags
from dsagen.check.cases import DecodeCase
from dsagen.check.compare import compare_decode
from dsagen.check.inputs import DecodeInputs, make_inputs
from dsagen.check.probes import gates_for
from dsagen.division import page_divisor
from dsagen.emulator import Counts, Memory
from dsagen.families.sparse_decode.family import FAMILY, NAME, plan_main
from dsagen.families.sparse_decode.op import DecodeShape, partition
from dsagen.families.sparse_decode.reference import DecodeReference, sparse_decode_reference
from dsagen.kv_format import kv_format
from dsagen.plan import KernelPlan, Variant
from dsagen.render import render

PARTIALS = ("lse_accum", "o_accum")
_PACK = {"pointer": "Q", "u64": "Q", "i64": "q", "u32": "I", "i32": "i", "f32": "f"}


@dataclass(frozen=True)
class Kernel:
    """A plan with the PTX that nvcc makes of it."""

    plan: KernelPlan
    ptx: str

    def launch(
        self, grid: int, values: Mapping[str, float], memory: Memory, seed: int = 0, schedule: str | None = None
    ) -> Counts:
        block = bytearray(self.plan.params_bytes)
        for field in self.plan.params:
            struct.pack_into("<" + _PACK[field.ctype], block, field.offset_bytes, values[field.name])
        plan = self.plan
        return emulator.launch(
            self.ptx, plan.symbol, grid, plan.threads, bytes(block), plan.smem_bytes, memory,
            seed=seed, schedule=schedule, os_threads=2, instruction_limit=1 << 24,
        )  # fmt: skip


def compile_ptx(text: str, arch: str) -> str:
    """PTX of a CUDA text, with the build's flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(text)
        command = [str(find_toolchain().nvcc), *compile_flags(arch).nvcc, str(source), "-o", f"{folder}/kernel.ptx"]
        subprocess.run(command, check=True, capture_output=True)
        return (Path(folder) / "kernel.ptx").read_text()


@cache
def main_kernel(fmt: str, heads_n: int, arch: str) -> Kernel:
    record = kv_format(fmt)
    axes = (
        ("kv", fmt),
        ("dqk", record.d_qk),
        ("dv", record.d_v),
        ("n", heads_n),
        ("smem", arch_row(arch).smem_class),
    )
    plan = plan_main(Variant(NAME, "main", "mma_sync", arch, axes))
    return Kernel(plan, compile_ptx(render(plan).text, arch))


@cache
def combine_kernel(d_v: int, arch: str) -> Kernel:
    plan = FAMILY.plan(Variant(NAME, "combine", "portable", arch, (("dv", d_v),)))
    return Kernel(plan, compile_ptx(render(plan).text, arch))


@cache
def inputs_of(case: DecodeCase, fmt: str, heads: int) -> DecodeInputs:
    return make_inputs(case, kv_format(fmt), heads, torch.device("cpu"), torch.Generator().manual_seed(11))


@cache
def reference_of(case: DecodeCase, fmt: str, heads: int) -> DecodeReference:
    inputs = inputs_of(case, fmt, heads)
    return sparse_decode_reference(
        inputs.q, inputs.record, inputs.caches, inputs.indices,
        sm_scale=inputs.sm_scale, topk_length=inputs.topk_length, attn_sink=inputs.attn_sink,
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
) -> Run:
    """Main and, for several splits, combine. `main` and `combine` replace the kernels that would be compiled.

    With a `page_stride_bytes` the cache's pages lie so far apart, with nothing in between.
    """
    record = kv_format(fmt)
    inputs = inputs_of(case, fmt, heads)
    main = main or main_kernel(fmt, heads, arch)
    shape = DecodeShape(case.batch, case.s_q, heads, case.topk)
    part = partition(shape, main.plan, 132, "off", splits)
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
    if splits > 1:
        partials = (
            torch.full((part.rows, splits, heads), math.nan),
            torch.full((part.rows, splits, heads, record.d_v), math.nan),
        )
        values |= {name: memory.add(name, t, initialised=False) for name, t in zip(PARTIALS, partials, strict=True)}
    (pool,) = inputs.caches.values()
    multiplier, shift = page_divisor(case.page_size)
    indices, lengths = inputs.indices, inputs.topk_length
    arguments = {
        **values,
        "q": memory.add("q", _base(inputs.q), writable=False), **_strides("q", inputs.q),
        **_place_pool(memory, pool, page_stride_bytes),
        "row_stride_bytes": record.io_stride_bytes, "page_multiplier": multiplier, "page_shift": shift,
        "page_size": case.page_size, "pool_tokens": pool.shape[0] * pool.shape[1],
        "head_groups": part.head_groups, "group_heads": part.group_heads, "topk": case.topk,
        "indices": memory.add("indices", _base(indices), writable=False),
        "indices_stride_b": indices.stride(0), "indices_stride_s": indices.stride(1),
        "topk_length": 0 if lengths is None else memory.add("topk_length", lengths.contiguous(), writable=False),
        "length_stride_b": 0 if lengths is None else lengths.contiguous().stride(0),
        "length_stride_s": 0 if lengths is None or lengths.dim() == 1 else 1,
        "scale_log2": inputs.sm_scale * math.log2(math.e),
    }  # fmt: skip
    counts = main.launch(part.main_ctas, arguments, memory, seed, schedule)
    if splits > 1:
        combine = combine or combine_kernel(record.d_v, arch)
        overlaps = combine.plan.overlaps_previous
        combine.launch(part.combine_ctas, values, memory.after(*PARTIALS) if overlaps else memory, seed, schedule)
    return Run(out, lse, counts)


def _place_pool(memory: Memory, pool: torch.Tensor, stride: int | None) -> dict[str, int]:
    """Arguments that say where the cache is."""
    if stride is None:
        base = memory.add("kv", _base(pool), writable=False)
        return {"kv": base, "page_stride_bytes": pool.stride(0) * pool.element_size()}
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


def problem(case: DecodeCase, fmt: str, found: Run) -> str:
    """What is wrong with the results, empty when nothing is."""
    record = kv_format(fmt)
    want = reference_of(case, fmt, found.out.shape[2])
    rows = case.batch * case.s_q
    out, lse = found.out.reshape(rows, -1, record.d_v), found.lse.reshape(rows, -1)
    gates = gates_for(case.values, want.peak)
    return compare_decode(out, lse, want.out, want.lse, record.scale_group_dims or 128, gates).problem
