"""What a measurement says: the floor that a case cannot beat, rates, and whether it got slower than the last record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsagen.arch import Arch, DeviceFigures
from dsagen.bench.data import DecodeCase

CaseKey = tuple[tuple[str, Any], ...]

# A run is called slower than the record beyond this share, which is above what replays of one build differ by.
SLOWER_BY = 0.05


@dataclass(frozen=True)
class PeerFigure:
    """One peer on one case: its GPU time per call, or None with the reason in `note`."""

    name: str
    label: str
    version: str
    gpu_us: float | None
    note: str = ""


@dataclass(frozen=True)
class DecodeFigures:
    """One case on one device.

    `gpu_us` is GPU time per call from graph replay with cold inputs, `spread` its relative p10..p90 distance;
    `issue_us` and `wall_us` are CPU and wall time of an eager call. `ctas` are those of the main kernel. `floor_us` is
    None on a device without measured ceilings, `record_us` None without an earlier record.
    """

    spec: str
    slug: str
    device: str
    case: DecodeCase
    num_splits: int
    ctas: int
    gpu_us: float
    spread: float
    input_sets: int
    issue_us: float
    wall_us: float
    floor_us: float | None
    peers: tuple[PeerFigure, ...] = ()
    record_us: float | None = None

    @property
    def record_bytes_per_s(self) -> float:
        """Bytes of the selected cache rows per second of GPU time."""
        return self.case.kv_bytes / self.gpu_us * 1e6

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations per second of GPU time."""
        return self.case.flops / self.gpu_us * 1e6

    @property
    def floor_ratio(self) -> float | None:
        """GPU time over the floor."""
        return None if self.floor_us is None else self.gpu_us / self.floor_us

    @property
    def slower(self) -> bool:
        """Whether the case takes notably longer than its last record."""
        return self.record_us is not None and self.gpu_us > self.record_us * (1 + SLOWER_BY)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence."""
        return {
            "spec": self.spec,
            "slug": self.slug,
            "device": self.device,
            "case": asdict(self.case),
            "num_splits": self.num_splits,
            "ctas": self.ctas,
            "gpu_us": round(self.gpu_us, 3),
            "spread": round(self.spread, 4),
            "input_sets": self.input_sets,
            "issue_us": round(self.issue_us, 2),
            "wall_us": round(self.wall_us, 2),
            "floor_us": None if self.floor_us is None else round(self.floor_us, 3),
            "tb_per_s": round(self.record_bytes_per_s / 1e12, 3),
            "tflops_per_s": round(self.flops_per_s / 1e12, 1),
            "record_us": self.record_us,
            "peers": [asdict(peer) for peer in self.peers],
        }


def floor_us(case: DecodeCase, figures: DeviceFigures) -> float:
    """The larger of the time for the floating-point operations and the time to read the selected rows, in us."""
    compute_s = case.flops / figures.bf16_flops_per_second
    return max(compute_s, case.kv_bytes / figures.dram_read_bytes_per_second) * 1e6


def figures_of(device: str, arch: Arch) -> DeviceFigures | None:
    """The measured ceilings of a device, by the name that its driver gives; None where nothing was measured."""
    return next((figures for figures in arch.figures if figures.device == device), None)


def case_key(case: Mapping[str, Any]) -> CaseKey:
    """What makes two recorded cases the same one."""
    return tuple(sorted(case.items()))
