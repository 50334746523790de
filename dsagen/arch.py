"""GPU architectures: one row each, with the limits that plans and guards are checked against.

Limits are those of the CUDA programming guide's table of compute capabilities. A name carries its suffix: `sm_90a` code
uses instructions that plain `sm_90` does not have, and nothing here is built for the plain target.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from dsagen.errors import SpecError

KIB = 1024
# What a thread can have on every arch.
MAX_REGISTERS_PER_THREAD = 255
# Shared memory that the driver keeps for itself in each block, inside the per-SM amount.
SMEM_RESERVED_PER_BLOCK_BYTES = 1 * KIB

MMA_SYNC = "mma_sync"  # warp-wide mma.sync, operands in registers
MMA_SYNC_BLOCK_SCALE = "mma_sync_block_scale"  # the same, plus block-scaled narrow types
WGMMA = "wgmma"  # warpgroup MMA, operands in shared memory
TCGEN05 = "tcgen05"  # tensor memory accumulators


@dataclass(frozen=True)
class DeviceFigures:
    """Ceilings measured on one product, for floors in tables and for cost models. Never extrapolated to another."""

    device: str
    sm_count: int
    l2_bytes: int
    dram_read_bytes_per_second: float
    bf16_flops_per_second: float

    @property
    def e4m3_flops_per_second(self) -> float:
        """Of warpgroup products of e4m3 operands, which take half the time of those of 16 bits."""
        return 2.0 * self.bf16_flops_per_second


@dataclass(frozen=True)
class Arch:
    """One row of the architecture table.

    `smem_optin_bytes` is the most dynamic shared memory a block may ask for, `smem_class` the same in KiB: kernels are
    planned per class. `mma_class` is the newest MMA model; every arch here also runs mma.sync. `min_cuda` is the first
    nvcc release (major, minor) whose output for the target is relied on.
    """

    name: str
    compute_capability: tuple[int, int]
    suffix: str
    smem_class: int
    smem_per_sm_bytes: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    mma_class: str
    min_cuda: tuple[int, int]
    registers_per_sm: int = 65536
    max_threads_per_block: int = 1024
    figures: tuple[DeviceFigures, ...] = ()

    @property
    def smem_optin_bytes(self) -> int:
        """Most dynamic shared memory of one block, in bytes."""
        return self.smem_class * KIB

    @property
    def max_warps_per_sm(self) -> int:
        """Resident warps of one SM."""
        return self.max_threads_per_sm // 32

    @property
    def has_e4m3_cvt(self) -> bool:
        """Whether cvt between e4m3 and f16 pairs is an instruction."""
        return self.compute_capability >= (8, 9)

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel may start before its predecessor ends (programmatic dependent launch)."""
        return self.compute_capability >= (9, 0)

    @property
    def has_bulk_copy(self) -> bool:
        """Whether cp.async.bulk with an mbarrier exists."""
        return self.compute_capability >= (9, 0)

    @property
    def has_clusters(self) -> bool:
        """Whether CTAs can be launched in clusters, which reach each other's shared memory."""
        return self.compute_capability >= (9, 0)

    @property
    def has_setmaxnreg(self) -> bool:
        """Whether warpgroups can hand registers to each other."""
        return self.compute_capability >= (9, 0) and self.suffix == "a"

    @property
    def virtual(self) -> str:
        """The PTX target that belongs to it, such as `compute_90a`."""
        return "compute_" + self.name.removeprefix("sm_")

    @property
    def ptx_define(self) -> int:
        """The value of __CUDA_ARCH__ when compiled for this target."""
        return self.compute_capability[0] * 100 + self.compute_capability[1] * 10


def _row(cc: tuple[int, int], suffix: str, smem_class: int, smem_per_sm_kib: int, threads: int, blocks: int,
         mma_class: str, min_cuda: tuple[int, int], *figures: DeviceFigures) -> Arch:  # fmt: skip
    return Arch(
        name=f"sm_{cc[0]}{cc[1]}{suffix}",
        compute_capability=cc,
        suffix=suffix,
        smem_class=smem_class,
        smem_per_sm_bytes=smem_per_sm_kib * KIB,
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        mma_class=mma_class,
        min_cuda=min_cuda,
        figures=figures,
    )


# Measured on random data: the read rate over consecutive rows, the matrix rate at the power limit.
H200 = DeviceFigures("NVIDIA H200", 132, 50 * KIB * KIB, 4.53e12, 797e12)

_ROWS = (
    #    cc       sfx  smem  /SM  threads blocks
    _row((8, 0), "", 163, 164, 2048, 32, MMA_SYNC, (12, 8)),
    _row((8, 6), "", 99, 100, 1536, 16, MMA_SYNC, (12, 8)),
    _row((8, 9), "", 99, 100, 1536, 24, MMA_SYNC, (12, 8)),
    _row((9, 0), "a", 227, 228, 2048, 32, WGMMA, (12, 8), H200),
    _row((10, 0), "a", 227, 228, 2048, 32, TCGEN05, (12, 8)),
    _row((10, 3), "a", 227, 228, 2048, 32, TCGEN05, (12, 9)),
    _row((11, 0), "a", 227, 228, 1536, 24, TCGEN05, (13, 0)),
    _row((12, 0), "a", 99, 100, 1536, 24, MMA_SYNC_BLOCK_SCALE, (12, 8)),
    _row((12, 1), "a", 99, 100, 1536, 24, MMA_SYNC_BLOCK_SCALE, (12, 9)),
)

ARCHS: dict[str, Arch] = {row.name: row for row in _ROWS}

# "sm_90a", "sm90a", "90a", "9.0a", and the same without the suffix.
_SPELLING = re.compile(r"(?:sm_?)?(?:(\d{1,2})\.(\d)|(\d{1,2})(\d))([a-z]?)\Z", re.ASCII)


def arch(name: str) -> Arch:
    """The row of an architecture, spelled `sm_90a`, `sm90a`, `90a` or `9.0a`.

    SpecError for anything else: a missing suffix names the suffixed target, a typo the nearest row.
    """
    if not isinstance(name, str):
        raise SpecError(f"unknown arch {name!r}{_meant_by(name)}: known are {', '.join(ARCHS)}")
    text = name.strip().lower()
    match = _SPELLING.match(text)
    if not match:
        raise SpecError(f"unknown arch {name!r}{_nearest(text)}: known are {', '.join(ARCHS)}")
    major, minor = int(match[1] or match[3]), int(match[2] or match[4])
    found = ARCHS.get(f"sm_{major}{minor}{match[5]}")
    if found is not None:
        return found
    raise SpecError(_refusal(name, text, major, minor, match[5]))


def arch_for_capability(major: int, minor: int) -> Arch:
    """The row that runs on a device of this compute capability; SpecError when there is none."""
    for row in _ROWS:
        if row.compute_capability == (major, minor):
            return row
    raise SpecError(f"no arch for compute capability {major}.{minor}: known are {', '.join(ARCHS)}")


def _refusal(name: str, text: str, major: int, minor: int, suffix: str) -> str:
    same = [row for row in _ROWS if row.compute_capability == (major, minor)]
    if not same:
        return f"unknown arch {name!r}{_nearest(text)}: known are {', '.join(ARCHS)}"
    row = same[0]
    if not suffix:
        return f"arch {name!r} lacks its suffix: kernels use instructions of {row.name} only, write {row.name}"
    if suffix == "f":
        return f"arch {name!r}: family targets are not built, write {row.name}"
    return f"unknown arch {name!r}: did you mean {row.name}? known are {', '.join(ARCHS)}"


def _meant_by(value: object) -> str:
    """The row that a number such as 90 or 10.0 stands for, as a hint."""
    digits = str(value).replace(".", "") if isinstance(value, int | float) else ""
    meant = [row.name for row in _ROWS if "{}{}".format(*row.compute_capability) == digits]
    return f" (did you mean {meant[0]}?)" if meant else ""


def _nearest(text: str) -> str:
    spelled = text if text.startswith("sm_") else f"sm_{text.removeprefix('sm')}"
    close = difflib.get_close_matches(spelled, ARCHS, n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""
