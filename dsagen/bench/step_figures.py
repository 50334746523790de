"""What a measurement of a decode step says: the whole, its stages, the floor and the goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dsagen.arch import DeviceFigures
from dsagen.bench.figures import EAGER_HEADER, CallFigures, number
from dsagen.bench.step_data import StepBenchCase

# KV format, heads, requests, context: us on the device; the sum of the fastest other libraries there is 35, 120, 695.
GOAL_DEVICE = "NVIDIA H200"
GOALS_US: Mapping[tuple[str, int, int, int], float] = {
    ("v32", 16, 1, 128 << 10): 25.0,
    ("v32", 16, 16, 128 << 10): 105.0,
    ("v32", 16, 128, 128 << 10): 672.0,
}
STAGES = ("indexer", "top-k", "attention")


@dataclass(frozen=True)
class StepFigures(CallFigures):
    """One step on one device.

    `gpu_us` is of launches as a plan takes them by itself, `overlapping_us` and `apart_us` with and without overlapping
    ones (None where the arch has none), `stage_us` of its stages, each by itself.
    Of a step whose scores are counted where they are made `uncounted_us` has what it takes, with launches that overlap
    and without, where top-k counts; `stage_us` then are stages of that one.
    """

    case: StepBenchCase
    overlapping_us: float | None
    apart_us: float
    stage_us: tuple[float, float, float]
    uncounted_us: tuple[float, float] | None = None

    op: ClassVar[str] = "decode_step"
    header: ClassVar[tuple[str, ...]] = (
        "requests",
        "next_n",
        "context",
        "k",
        "blocks",
        "GPU us",
        "spread",
        "overlap us",
        "apart us",
        "uncounted, apart us",
        *(f"{stage} us" for stage in STAGES),
        "floor us",
        "x floor",
        "goal us",
        *EAGER_HEADER,
    )

    @property
    def title(self) -> str:
        """The case in words."""
        case = self.case
        tokens = f" x {case.next_n} tokens" if case.next_n > 1 else ""
        blocks = f", {case.selects} {case.candidate_blocks} blocks" if case.selects else ""
        return f"step of {case.requests} requests{tokens}, {case.context} keys, k {case.selected}{blocks}"

    @property
    def goal_us(self) -> float | None:
        """GPU time to reach; None without a goal for the case, or on another device."""
        case = self.case
        goal = GOALS_US.get((case.kv_format, case.heads, case.requests, case.context))
        applies = self.device == GOAL_DEVICE and case.next_n == 1 and case.index_heads == 64 and case.selected == 2048
        # Other libraries' sums are those of layers that select from all keys.
        return goal if applies and case.selects is None else None

    @property
    def missed(self) -> tuple[str, ...]:
        """The goal, where it is not reached."""
        late = self.goal_us is not None and self.gpu_us > self.goal_us
        return (f"{self.gpu_us:.1f} us, goal {self.goal_us:.1f} us",) if late else ()

    def cells(self) -> tuple[str, ...]:
        """The table's row."""
        case = self.case
        return (
            str(case.requests),
            str(case.next_n),
            str(case.context),
            str(case.selected),
            case.selects or "",
            f"{self.gpu_us:.1f}",
            f"{self.spread:.1%}",
            number(self.overlapping_us, ".1f"),
            f"{self.apart_us:.1f}",
            "" if self.uncounted_us is None else ", ".join(f"{us:.1f}" for us in self.uncounted_us),
            *(f"{stage:.1f}" for stage in self.stage_us),
            number(self.floor_us, ".1f"),
            number(self.floor_ratio, ".2f"),
            number(self.goal_us, ".1f"),
            *self._eager_cells(),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence."""
        own = {
            "overlapping_us": None if self.overlapping_us is None else round(self.overlapping_us, 3),
            "apart_us": round(self.apart_us, 3),
            "stage_us": {name: round(us, 3) for name, us in zip(STAGES, self.stage_us, strict=True)},
            "goal_us": self.goal_us,
        }
        if self.uncounted_us is not None:
            own["uncounted_us"], own["uncounted_apart_us"] = (round(us, 3) for us in self.uncounted_us)
        return self._plain(self.case.to_json(), own)


def step_floor_us(case: StepBenchCase, figures: DeviceFigures) -> float:
    """The larger of the time to read keys and selected rows once, and that of all products, in us; scores as e4m3."""
    scores = case.score_flops / figures.e4m3_flops_per_second
    compute = scores + case.attention_flops / figures.bf16_flops_per_second
    return max(compute, case.read_bytes / figures.dram_read_bytes_per_second) * 1e6
