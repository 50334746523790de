"""Running a kernel of a PTX text on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dsagen.emulator.counters import Counters, Meter
from dsagen.emulator.library import LaunchBlock, RegionRow, load_library
from dsagen.emulator.lower import lower_instruction
from dsagen.emulator.memory import Memory
from dsagen.emulator.operations import Lowering
from dsagen.emulator.program import Program, assemble
from dsagen.emulator.ptx import Module, parse
from dsagen.errors import EmulatorError

MOST_THREADS = 1024
INSTRUCTION_LIMIT = 1 << 32


@dataclass(frozen=True)
class Counts:
    """What a launch did, over all CTAs: warp instructions (guarded-off ones too), completed barriers, matrix
    products, and bytes that asynchronous copies wrote. `measured` has more where that was asked for.
    """

    instructions: int
    barriers: int
    matrix_products: int
    copied_bytes: int
    measured: Counters | None = None


def launch(
    ptx: str,
    entry: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    params: bytes,
    smem_bytes: int,
    memory: Memory,
    *,
    seed: int = 0,
    os_threads: int = 1,
    races: bool = True,
    counters: bool = False,
    instruction_limit: int = INSTRUCTION_LIMIT,
    library_folder: Path | None = None,
) -> Counts:
    """Run kernel `entry` of a PTX text on `grid` CTAs of `block` threads, with `smem_bytes` of dynamic shared memory.

    `params` is the argument block, little-endian, as the kernel's parameters are laid out; pointers are addresses that
    `memory.add` returned. Seed 0 runs warps in turn and lands asynchronous copies as late as it may; any other seed
    draws both, and repeats exactly. `races` looks for accesses of shared memory that nothing orders; a launch is faster
    without. `counters` measures what the launch does (Counts.measured), which takes time. `instruction_limit` is per
    CTA. EmulatorError for PTX that does not parse, a launch that does not fit the kernel, and whatever a kernel must
    not do: the message names the kernel, the PTX and CUDA line, the thread, and for a deadlock who waits where.
    """
    library = load_library(library_folder)
    program = _program(ptx, entry, library_folder)
    extents, threads = _extents("grid", grid), _extents("block", block)
    _require_fit(program, threads, params, smem_bytes)
    rows, kept = _regions(program, memory)
    texts = (ctypes.c_char_p * len(program.unknown))(*(text.encode() for text in program.unknown))
    buffers = [
        ctypes.create_string_buffer(data, max(len(data), 1)) for data in (program.code, program.preloads, params)
    ]
    arrays = (program.args, program.ptx_lines, program.cuda_lines)
    args, ptx_lines, cuda_lines = (ctypes.c_void_p(array.buffer_info()[0]) for array in arrays)
    run = LaunchBlock(
        code=ctypes.cast(buffers[0], ctypes.c_void_p),
        args=args,
        ptx_lines=ptx_lines,
        cuda_lines=cuda_lines,
        preloads=ctypes.cast(buffers[1], ctypes.c_void_p),
        unknown=ctypes.cast(texts, ctypes.c_void_p),
        regions=ctypes.cast(rows, ctypes.c_void_p),
        params=ctypes.cast(buffers[2], ctypes.c_void_p),
        instructions=program.instructions,
        slots=program.slots,
        predicates=program.predicates,
        preload_count=len(program.preloads) // 12,
        region_count=len(rows),
        param_bytes=program.param_bytes,
        local_bytes=program.local_bytes,
        shared_bytes=program.static_shared_bytes + smem_bytes,
        dynamic_shared_bytes=smem_bytes,
        grid=extents,
        block=threads,
        os_threads=os_threads,
        races=races,
        seed=seed,
        instruction_limit=instruction_limit,
    )
    meter = Meter(program.code, tuple(library.numbers)) if counters else None
    run.meter = None if meter is None else ctypes.addressof(meter.totals)
    failed = library.handle.vm_run(ctypes.byref(run))
    del kept
    if failed:
        raise EmulatorError(f"{entry}: {run.message.decode(errors='replace')}\n  (seed {seed})")
    instructions, barriers, products, copied = run.counters
    measured = meter.read(barriers, copied) if meter is not None else None
    return Counts(instructions, barriers, products, copied, measured)


def coverage(ptx: str) -> dict[str, int]:
    """Opcodes of a PTX text's kernels that the emulator does not have, with how often each occurs."""
    missing: dict[str, int] = {}
    module = _module(ptx)
    for kernel in module.kernels.values():
        names = [item.name for item in (*module.variables, *kernel.variables)] + [item.name for item in kernel.params]
        lowering = Lowering(dict.fromkeys(names, 0))
        for instruction in kernel.instructions:
            if any(op.name == "unknown" for op in lower_instruction(lowering, instruction)):
                missing[instruction.opcode] = missing.get(instruction.opcode, 0) + 1
    return dict(sorted(missing.items()))


@lru_cache(maxsize=32)
def _module(ptx: str) -> Module:
    return parse(ptx)


@lru_cache(maxsize=128)
def _program(ptx: str, entry: str, library_folder: Path | None) -> Program:
    return assemble(_module(ptx), entry, load_library(library_folder).numbers)


def _extents(what: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise EmulatorError(f"{what} {value!r}: expected one to three positive sizes")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _require_fit(program: Program, block: tuple[int, int, int], params: bytes, smem_bytes: int) -> None:
    threads = block[0] * block[1] * block[2]
    if threads > MOST_THREADS:
        raise EmulatorError(f"{program.entry}: a block of {threads} threads; the limit is {MOST_THREADS}")
    if len(params) != program.param_bytes:
        raise EmulatorError(
            f"{program.entry}: {len(params)} bytes of arguments, the kernel takes {program.param_bytes}"
        )
    if smem_bytes < 0:
        raise EmulatorError(f"{program.entry}: {smem_bytes} bytes of dynamic shared memory")


def _regions(program: Program, memory: Memory) -> tuple[ctypes.Array[RegionRow], list[object]]:
    """Buffers and module variables in the order of their addresses, and what must stay alive meanwhile."""
    rows: list[RegionRow] = []
    kept: list[object] = []
    for b in memory.buffers:
        end = b.address + b.size_bytes
        rows.append(RegionRow(b.address, end, b.host, b.writable, b.after_wait, b.name.encode()))
    for variable in program.variables:
        data = ctypes.create_string_buffer(variable.initial, max(len(variable.initial), 1))
        kept.append(data)
        end = variable.address + len(variable.initial)
        host = ctypes.addressof(data)
        rows.append(RegionRow(variable.address, end, host, variable.writable, 0, variable.name.encode()))
    rows.sort(key=lambda row: int(row.begin))
    return (RegionRow * len(rows))(*rows), kept
