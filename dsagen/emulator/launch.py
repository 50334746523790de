"""Running a kernel of a PTX text on the CPU."""

from __future__ import annotations

import ctypes
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypedDict, Unpack

from dsagen.arch import ARCHS, KIB
from dsagen.emulator.counters import Counters, Meter
from dsagen.emulator.library import LaunchBlock, RegionRow, load_library
from dsagen.emulator.memory import Memory
from dsagen.emulator.program import Program, assemble, lower_kernel
from dsagen.emulator.program_cache import SHORTEST_TEXT, ProgramCache
from dsagen.emulator.ptx import parse
from dsagen.emulator.syntax import Module
from dsagen.errors import EmulatorError

MOST_THREADS = 1024
# CTAs of a cluster, where a kernel opts in to more than the eight that all devices have.
MOST_CLUSTER = 16
MOST_CTAS = (1 << 32) - 4096
MOST_STATIC_SHARED_BYTES = 48 * KIB
MOST_LOCAL_BYTES = 512 * KIB
_GRID_LIMITS = (0x7FFF_FFFF, 0xFFFF, 0xFFFF)
_BLOCK_LIMITS = (1024, 1024, 64)
INSTRUCTION_LIMIT = 1 << 32
# As enum Schedule of vm/machine.h has them.
SCHEDULES = ("turns", "random", "priorities")


class SessionOptions(TypedDict, total=False):
    """How a launch runs; see `launch`."""

    seed: int
    schedule: str | None
    resident: int
    cluster: int | Sequence[int] | None
    races: bool
    library_folder: Path | None


class LaunchOptions(SessionOptions, total=False):
    """How a launch runs that nobody stops on the way."""

    os_threads: int
    instruction_limit: int


@dataclass(frozen=True)
class _Options:
    """The same with their defaults."""

    seed: int = 0
    schedule: str | None = None
    resident: int = 1
    cluster: int | Sequence[int] | None = None
    os_threads: int = 1
    races: bool = True
    instruction_limit: int = INSTRUCTION_LIMIT
    library_folder: Path | None = None

    def chosen_schedule(self) -> str:
        """The schedule's name; EmulatorError for options that are out of range or at odds with each other."""
        if not 1 <= self.instruction_limit < 1 << 64:
            raise EmulatorError(f"instruction_limit {self.instruction_limit}: at least 1 and below 2^64")
        schedule = self.schedule if self.schedule is not None else "random" if self.seed else "turns"
        if schedule not in SCHEDULES:
            raise EmulatorError(f"schedule {schedule!r}: there are {', '.join(SCHEDULES)}")
        if self.seed < 0 or self.seed >> 64:
            raise EmulatorError(f"seed {self.seed}: a seed has 64 bits and no sign")
        resident, os_threads = self.resident, self.os_threads
        if resident < 1 or os_threads < 1:
            raise EmulatorError(f"resident {resident} and os_threads {os_threads}: at least 1 each")
        if resident > 1 and os_threads > 1:
            raise EmulatorError(f"resident {resident} CTAs take turns on one OS thread; os_threads is {os_threads}")
        return schedule


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


class Prepared:
    """A launch that is ready to run: what the machine is given, and everything that has to stay alive meanwhile."""

    def __init__(self, program: Program, block: LaunchBlock, keep: list[object], how: str) -> None:
        self.program = program
        self.block = block
        self._keep = keep
        self._how = how

    def error(self) -> EmulatorError:
        """What the machine said, with all that it takes to have it said again."""
        message = _located(self.program, self.block.message.decode(errors="replace"))
        return EmulatorError(f"{self.program.entry}: {message}\n  ({self._how})")


def launch(
    ptx: str,
    entry: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    params: bytes,
    smem_bytes: int,
    memory: Memory,
    *,
    counters: bool = False,
    **options: Unpack[LaunchOptions],
) -> Counts:
    """Run kernel `entry` of a PTX text on `grid` CTAs of `block` threads, with `smem_bytes` of dynamic shared memory.

    `params` is the argument block, little-endian, as the kernel's parameters are laid out; pointers are addresses that
    `memory.add` returned. `schedule` is `turns`, in which warps run in turn and asynchronous copies land as late as
    they may, `random`, or `priorities`, in which the warp of the highest priority runs until it waits; the last two
    draw from the seed, and repeat exactly. By default seed 0 takes turns and any other is random. `resident` CTAs run
    by turns on the OS thread, for kernels whose CTAs wait for each other; it is 1 where there are more `os_threads`.
    CTAs of a cluster are resident together in any case; `cluster` gives its extents where the PTX does not.
    `races` looks for accesses that nothing orders; a launch is faster without. `counters` measures what the launch does
    (Counts.measured), which takes time. `instruction_limit` is per CTA.

    EmulatorError for PTX that does not parse, a launch that does not fit the kernel, and whatever a kernel must not do:
    the message names the kernel, the PTX and CUDA line, the thread, and for a deadlock who waits where.
    """
    library = load_library(options.get("library_folder"))
    ready = prepare(ptx, entry, grid, block, params, smem_bytes, memory, **options)
    meter = Meter(ready.program.code, tuple(library.numbers)) if counters else None
    ready.block.meter = None if meter is None else ctypes.addressof(meter.totals)
    if library.handle.vm_run(ctypes.byref(ready.block)):
        raise ready.error()
    instructions, barriers, products, copied = ready.block.counters
    measured = None if meter is None else meter.read(barriers, copied)
    return Counts(instructions, barriers, products, copied, measured)


def prepare(
    ptx: str,
    entry: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    params: bytes,
    smem_bytes: int,
    memory: Memory,
    **options: Unpack[LaunchOptions],
) -> Prepared:
    """A launch with the arguments of `launch`, checked, but not run."""
    how = _Options(**options)
    program = _program(ptx, entry, how.library_folder)
    extents, threads = _extents("grid", grid, _GRID_LIMITS), _extents("block", block, _BLOCK_LIMITS)
    _require_fit(program, extents, threads, params, smem_bytes)
    cluster = _cluster(program, how.cluster, extents)
    chosen = how.chosen_schedule()
    rows, kept = _regions(program, memory)
    texts = (ctypes.c_char_p * len(program.unknown))(*(text.encode() for text in program.unknown))
    buffers = [
        ctypes.create_string_buffer(data, max(len(data), 1)) for data in (program.code, program.preloads, bytes(params))
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
        cluster=cluster,
        os_threads=how.os_threads,
        races=how.races,
        schedule=SCHEDULES.index(chosen),
        resident=how.resident,
        seed=how.seed,
        instruction_limit=how.instruction_limit,
    )
    keep = [memory, program, rows, kept, texts, *buffers]
    return Prepared(program, run, keep, f"seed {how.seed}, schedule {chosen}, {how.resident} resident")


def coverage(ptx: str) -> dict[str, int]:
    """Opcodes of a PTX text's kernels and functions that the emulator does not have, with how often each occurs.

    A call that cannot run stands there as `call` with the name and the reason.
    """
    missing: dict[str, int] = {}
    module = _module(ptx)
    for kernel in module.kernels.values():
        for op in lower_kernel(module, kernel):
            if op.name == "unknown" and not (op.keeps_guard and op.text.startswith("call")):
                missing[op.text] = missing.get(op.text, 0) + 1
    return dict(sorted(missing.items()))


@lru_cache(maxsize=32)
def _module(ptx: str) -> Module:
    return parse(ptx)


@lru_cache(maxsize=128)
def _program(ptx: str, entry: str, library_folder: Path | None) -> Program:
    library = load_library(library_folder)
    if len(ptx) < SHORTEST_TEXT:
        return assemble(_module(ptx), entry, library.numbers)
    cache = ProgramCache.beside(library)
    program = cache.read(ptx, entry)
    if program is None:
        program = assemble(_module(ptx), entry, library.numbers)
        cache.write(ptx, entry, program)
    return program


def _extents(what: str, value: int | Sequence[int], limits: tuple[int, int, int]) -> tuple[int, int, int]:
    try:
        given: Sequence[int] = value if isinstance(value, Sequence) else (value,)
        sizes = [operator.index(size) for size in given]
    except TypeError:
        sizes = []
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise EmulatorError(f"{what} {value!r}: expected one to three positive sizes")
    for axis, size, limit in zip("xyz", sizes, limits, strict=False):
        if size > limit:
            raise EmulatorError(f"{what} {value!r}: {axis} is {size}, the limit is {limit}")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _require_fit(
    program: Program, grid: tuple[int, int, int], block: tuple[int, int, int], params: bytes, smem_bytes: int
) -> None:
    threads = block[0] * block[1] * block[2]
    if threads > MOST_THREADS:
        raise EmulatorError(f"{program.entry}: a block of {threads} threads; the limit is {MOST_THREADS}")
    if grid[0] * grid[1] * grid[2] > MOST_CTAS:
        raise EmulatorError(f"{program.entry}: {grid[0]} x {grid[1]} x {grid[2]} CTAs; the limit is {MOST_CTAS}")
    if not isinstance(params, (bytes, bytearray)):
        raise EmulatorError(f"{program.entry}: arguments are {type(params).__name__}, expected bytes")
    if len(params) != program.param_bytes:
        raise EmulatorError(
            f"{program.entry}: {len(params)} bytes of arguments, the kernel takes {program.param_bytes}"
        )
    _require_memory(program, smem_bytes)


def _cluster(program: Program, given: int | Sequence[int] | None, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """The extents of a cluster: those of the PTX, or those of the launch."""
    extents = program.cluster or (1, 1, 1)
    if given is not None:
        extents = _extents("cluster", given, (MOST_CLUSTER,) * 3)
        if program.cluster is not None and extents != program.cluster:
            raise EmulatorError(
                f"{program.entry}: a cluster of {extents[0]} x {extents[1]} x {extents[2]} CTAs, but the PTX demands "
                f"{' x '.join(map(str, program.cluster))}: leave it out"
            )
    x, y, z = extents
    if not 1 <= x * y * z <= MOST_CLUSTER:
        raise EmulatorError(f"{program.entry}: a cluster of {x} x {y} x {z} CTAs; the limit is {MOST_CLUSTER}")
    if any(size % extent for size, extent in zip(grid, extents, strict=True)):
        raise EmulatorError(
            f"{program.entry}: a grid of {grid[0]} x {grid[1]} x {grid[2]} CTAs is no multiple of the cluster, "
            f"{x} x {y} x {z}: launch whole clusters"
        )
    return extents


def _require_memory(program: Program, smem_bytes: int) -> None:
    if smem_bytes < 0:
        raise EmulatorError(f"{program.entry}: {smem_bytes} bytes of dynamic shared memory")
    static = program.static_shared_bytes
    if static > MOST_STATIC_SHARED_BYTES:
        raise EmulatorError(
            f"{program.entry}: {static} bytes of static shared memory, the limit is {MOST_STATIC_SHARED_BYTES}"
        )
    row = ARCHS.get(program.target)
    limit = row.smem_optin_bytes if row is not None else max(row.smem_optin_bytes for row in ARCHS.values())
    if static + smem_bytes > limit:
        raise EmulatorError(
            f"{program.entry}: {static} bytes of static and {smem_bytes} of dynamic shared memory; a block of "
            f"{program.target or 'any arch'} has {limit}"
        )
    if program.local_bytes > MOST_LOCAL_BYTES:
        raise EmulatorError(
            f"{program.entry}: {program.local_bytes} bytes of local memory a thread, the limit is {MOST_LOCAL_BYTES}"
        )


def _located(program: Program, message: str) -> str:
    """The message, and for each place that it names in what it was inlined."""
    lines = dict.fromkeys(int(line) for line in re.findall(r"PTX line (\d+), CUDA line \d+", message))
    known = [f"\n  PTX line {line} is {program.places[line]}" for line in lines if line in program.places]
    return message + "".join(known)


def _regions(program: Program, memory: Memory) -> tuple[ctypes.Array[RegionRow], list[object]]:
    """Buffers and module variables in the order of their addresses, and what must stay alive meanwhile."""
    rows: list[RegionRow] = []
    kept: list[object] = []
    for b in memory.buffers:
        end = b.address + b.size_bytes
        rows.append(RegionRow(b.address, end, b.host, b.writable, b.after_wait, b.valid_host, b.name.encode()))
    for variable in program.variables:
        data = ctypes.create_string_buffer(variable.initial, max(len(variable.initial), 1))
        kept.append(data)
        end = variable.address + len(variable.initial)
        host = ctypes.addressof(data)
        rows.append(RegionRow(variable.address, end, host, variable.writable, 0, None, variable.name.encode()))
    rows.sort(key=lambda row: int(row.begin))
    return (RegionRow * len(rows))(*rows), kept
