"""Counters of a launch: instructions by class, tensor FLOPs, traffic of global memory, wavefronts of shared memory."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsagen.emulator.wgmma import A_IN_REGISTERS, ROWS

# As in vm/counters.h.
METRICS = (
    "global_read_bytes", "global_written_bytes", "global_read_sectors", "global_written_sectors",
    "shared_read_wavefronts", "shared_written_wavefronts", "shared_read_conflicts", "shared_written_conflicts",
    "bulk_bytes", "bulk_boxes", "cluster_bytes",
)  # fmt: skip

_RARE = frozenset(("bulk_bytes", "bulk_boxes", "cluster_bytes"))

# Class of an instruction of the machine by the first pattern that its name matches as a whole; a name that none
# matches has no class, which a test refuses. `ld`, `st` and `atom` get their space appended.
_CLASSES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("tensor", r"(mma|wgmma)_\w+"),
        ("ldmatrix", r"ldmatrix"),
        ("stmatrix", r"stmatrix"),
        ("ld", r"ld"),
        ("st", r"st"),
        ("atom", r"atom|red"),
        ("mbarrier", r"mbarrier_\w+"),
        ("async", r"(copy|grid|tensor|warpgroup)_\w+"),
        ("barrier", r"bar(_\w+)?|barrier_\w+"),
        ("fence", r"fence\w*|membar\w*"),
        ("warp", r"shfl|vote|elect|redux|activemask|match_\w+|movmatrix"),
        ("branch", r"bra|brx|exit|call|ret|trap|unknown|misuse"),
        ("cvt", r"cvt_\w+"),
        ("fp", r"\w+_(f16|bf16)(x2)?|\w+_f(32|64)|testp_\w+"),
        ("other", r"nothing|set_registers|pause|clock"),
        (
            "alu",
            r"(add|sub|mul|mad|div|rem|min|max|abs|neg|not|and|or|xor|shl|shr|mov|selp|setp|set|popc|clz|brev|bfind|bfe"
            r"|bfi|prmt|shf|lop3|dp4a|dp2a|pack|unpack|cvta|isspacep|mapa|cta_rank|explicit_cluster|generic|sad|fns|szext|bmsk)(_\w+)?",
        ),
    )
)
_SPACES = ("generic", "global", "shared", "local", "param", "const", "cluster")
_TENSOR = re.compile(r"(wg)?mma_(?:bytes_)?k(\d+)(?:_\w+)?\Z")
# Rows times columns of mma.sync's result, and the two operations of a product that is added.
_MMA_ELEMENTS, _FLOPS_OF_PRODUCT = 16 * 8, 2
# Bytes of a row of either operand of wgmma.
_WGMMA_ROW_BYTES = 32
_INSTRUCTION = struct.Struct("<HhIiI")


@dataclass(frozen=True)
class Counters:
    """What a launch did, over all CTAs.

    `instructions` are warp instructions by class, guarded-off ones too; polls of an mbarrier that failed, and the way
    back to the next one, do not count. Bytes of global memory are what lanes asked for, sectors are of 32 bytes, each
    once per request of a warp. Wavefronts of shared memory are what banks need to serve a request; conflicts are those
    past the first of each part that is served at once. A product of a warpgroup counts once for its four warps;
    `wgmma_shared_bytes` are those of its operands, B's once, and A's where it does not lie in registers. Bulk bytes are
    of bulk and tensor copies, for each CTA that a multicast reaches, boxes count its tensor copies; cluster bytes move
    between the shared memories of CTAs.
    """

    instructions: Mapping[str, int]
    tensor_flops: int
    barriers: int
    async_copied_bytes: int
    global_read_bytes: int
    global_written_bytes: int
    global_read_sectors: int
    global_written_sectors: int
    shared_read_wavefronts: int
    shared_written_wavefronts: int
    shared_read_conflicts: int
    shared_written_conflicts: int
    bulk_bytes: int
    bulk_boxes: int
    cluster_bytes: int
    wgmma_shared_bytes: int = 0

    def lines(self) -> list[str]:
        """A line for each counter, classes first; what few kernels do has one only where there is any."""
        rows = [(f"instructions.{name}", value) for name, value in self.instructions.items()]
        rows += [("tensor_flops", self.tensor_flops), ("barriers", self.barriers)]
        rows += [("async_copied_bytes", self.async_copied_bytes), *((name, getattr(self, name)) for name in METRICS)]
        if self.wgmma_shared_bytes:
            rows.append(("wgmma_shared_bytes", self.wgmma_shared_bytes))
        rows = [(name, value) for name, value in rows if value or name not in _RARE]
        return [f"{name:<28}{value:>16,}" for name, value in rows]


class MeterTotals(ctypes.Structure):
    """vm::MeterTotals of vm/counters.h."""

    _fields_ = (("executions", ctypes.c_void_p), ("metrics", ctypes.c_void_p))


class Meter:
    """Room for the counters of one launch of a program's code."""

    def __init__(self, code: bytes, names: Sequence[str]) -> None:
        self._code, self._names = code, names
        self._executions = (ctypes.c_uint64 * (len(code) // _INSTRUCTION.size))()
        self._metrics = (ctypes.c_uint64 * len(METRICS))()
        self.totals = MeterTotals(ctypes.addressof(self._executions), ctypes.addressof(self._metrics))

    def read(self, barriers: int, copied_bytes: int) -> Counters:
        """The counters once the launch has ended."""
        found: dict[str, int] = {}
        flops = 0
        operands = 0
        for (number, _, _, imm, flags), count in zip(
            _INSTRUCTION.iter_unpack(self._code), self._executions, strict=True
        ):
            if count:
                name = self._names[number]
                kind = class_of(name, flags)
                found[kind] = found.get(kind, 0) + count
                flops += count * flops_of(name, imm)
                operands += count * operand_bytes_of(name, imm, flags)
        metrics = dict(zip(METRICS, self._metrics, strict=True))
        return Counters(
            dict(sorted(found.items())), flops, barriers, copied_bytes, **metrics, wgmma_shared_bytes=operands
        )


def class_of(name: str, flags: int = 0) -> str:
    """The class of an instruction of the machine; KeyError for a name that has none."""
    for kind, pattern in _CLASSES:
        if pattern.fullmatch(name):
            return f"{kind}.{_SPACES[flags & 7]}" if kind in ("ld", "st", "atom") else kind
    raise KeyError(name)


def flops_of(name: str, columns: int = 0) -> int:
    """Floating-point operations of a matrix product of a warp, or of a warpgroup for `columns`; else 0."""
    found = _TENSOR.match(name)
    if found is None:
        return 0
    return _FLOPS_OF_PRODUCT * (ROWS * columns if found[1] else _MMA_ELEMENTS) * int(found[2])


def operand_bytes_of(name: str, columns: int, flags: int) -> int:
    """Bytes of shared memory that a product of a warpgroup reads, 0 for anything else."""
    found = _TENSOR.match(name)
    if found is None or found[1] is None:
        return 0
    return _WGMMA_ROW_BYTES * (columns + (0 if flags & A_IN_REGISTERS else ROWS))


def total(counters: Sequence[Counters]) -> Counters:
    """The sums over several launches."""
    classes = sorted({name for one in counters for name in one.instructions})
    plain = [name for name in Counters.__dataclass_fields__ if name != "instructions"]
    return Counters(
        {kind: sum(one.instructions.get(kind, 0) for one in counters) for kind in classes},
        **{name: sum(getattr(one, name) for one in counters) for name in plain},
    )
