"""What a measurement of top-k says: time to read the scores, the goal, what a mode costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dsagen.arch import DeviceFigures
from dsagen.bench.figures import EAGER_HEADER, CallFigures, number
from dsagen.bench.topk_data import TopkBenchCase
from dsagen.spec import DeploymentSpec

# Dtype, rows, width, slots: us on the device, which is what the fastest other library took there.
GOAL_DEVICE = "NVIDIA H200"
GOALS_US: Mapping[tuple[str, int, int, int], float] = {
    ("fp32", 1, 32 << 10, 2048): 10.0,
    ("fp32", 128, 32 << 10, 2048): 16.0,
    ("fp32", 64, 128 << 10, 2048): 35.0,
    ("fp32", 128, 128 << 10, 2048): 46.0,
    ("fp32", 4096, 32 << 10, 2048): 270.0,
    ("bf16", 128, 32 << 10, 2048): 13.0,
    ("bf16", 128, 128 << 10, 2048): 26.0,
}
# What a mode may cost, as a multiple of `off`.
MODE_RATIOS: Mapping[str, float] = {"set": 1.15, "order": 1.3}


@dataclass(frozen=True)
class TopkFigures(CallFigures):
    """One selection on one device.

    `floor_us` is the time to read the scores once. `off_us` is GPU time of the same shape in mode `off`, None where
    that was not measured.
    """

    case: TopkBenchCase
    off_us: float | None = None

    op: ClassVar[str] = "topk"
    header: ClassVar[tuple[str, ...]] = (
        "scores",
        "rows",
        "width",
        "k",
        "mode",
        "GPU us",
        "spread",
        "floor us",
        "x floor",
        "TB/s",
        "goal us",
        "x off",
        *EAGER_HEADER,
    )

    @property
    def title(self) -> str:
        """The case in words."""
        case = self.case
        return f"{case.score} {case.rows} x {case.width}, k {case.k}, {case.mode}"

    @property
    def goal_us(self) -> float | None:
        """GPU time to reach: the shape's, which holds for `order` times its ratio; None without one."""
        case = self.case
        goal = GOALS_US.get((case.score, case.rows, case.width, case.k)) if self.device == GOAL_DEVICE else None
        return None if goal is None else goal * (MODE_RATIOS["order"] if case.mode == "order" else 1.0)

    @property
    def off_ratio(self) -> float | None:
        """GPU time over that of mode `off`."""
        return None if self.off_us is None else self.gpu_us / self.off_us

    @property
    def missed(self) -> tuple[str, ...]:
        """Goals that are not reached, in words."""
        found = []
        if self.goal_us is not None and self.gpu_us > self.goal_us:
            found.append(f"{self.gpu_us:.1f} us, goal {self.goal_us:.1f} us")
        most = MODE_RATIOS.get(self.case.mode)
        if most is not None and self.off_ratio is not None and self.off_ratio > most:
            found.append(f"{self.off_ratio:.2f} x off, goal {most:.2f} x")
        return tuple(found)

    @property
    def bytes_per_s(self) -> float:
        """Bytes of scores per second of GPU time."""
        return self.case.read_bytes / self.gpu_us * 1e6

    def cells(self) -> tuple[str, ...]:
        """The table's row."""
        case = self.case
        return (
            case.score,
            str(case.rows),
            str(case.width),
            str(case.k),
            case.mode,
            f"{self.gpu_us:.1f}",
            f"{self.spread:.1%}",
            number(self.floor_us, ".2f"),
            number(self.floor_ratio, ".2f"),
            f"{self.bytes_per_s / 1e12:.2f}",
            number(self.goal_us, ".1f"),
            number(self.off_ratio, ".2f"),
            *self._eager_cells(),
        )

    def measured_spec(self, spec: DeploymentSpec) -> DeploymentSpec:
        """The spec for the case's dtype of scores."""
        return spec if spec.scores == self.case.score else spec.replace(scores=self.case.score)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence."""
        own = {
            "tb_per_s": round(self.bytes_per_s / 1e12, 3),
            "goal_us": self.goal_us,
            "off_ratio": None if self.off_ratio is None else round(self.off_ratio, 3),
        }
        return self._plain(asdict(self.case), own)


def topk_floor_us(case: TopkBenchCase, figures: DeviceFigures) -> float:
    """Time to read every score once from DRAM, in us. Sets that fit the cache together may take less."""
    return case.read_bytes / figures.dram_read_bytes_per_second * 1e6
