"""What a measurement of the indexer's logits says: the floor, the goals, and how far both are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dsagen.bench.figures import EAGER_HEADER, CallFigures, number
from dsagen.bench.logits_data import LogitsBenchCase

GOAL_DEVICE = "NVIDIA H200"
# Form, heads, requests, tokens of each, keys: us to reach and to aim at, of fp8 keys and fp32 scores.
GOALS_US: Mapping[tuple[str, int, int, int, int], tuple[float, float]] = {
    ("paged", 64, 1, 1, 4 << 10): (3.7, 2.8),
    ("paged", 64, 1, 1, 128 << 10): (7.0, 5.5),
    ("paged", 64, 16, 1, 32 << 10): (22.0, 19.0),
    ("paged", 64, 128, 1, 32 << 10): (144.0, 138.0),
    ("paged", 64, 128, 1, 128 << 10): (560.0, 545.0),
    ("paged", 64, 128, 2, 128 << 10): (610.0, 560.0),
    ("ragged", 64, 1, 4096, 32 << 10): (2000.0, 1750.0),
    ("ragged", 32, 1, 4096, 32 << 10): (1100.0, 900.0),
}


@dataclass(frozen=True)
class LogitsFigures(CallFigures):
    """One call on one device. `floor_us` is the larger of the time to move keys and scores and that of the products."""

    case: LogitsBenchCase

    op: ClassVar[str] = "indexer_logits"
    header: ClassVar[tuple[str, ...]] = (
        "form",
        "keys",
        "heads",
        "batch",
        "next_n",
        "kv",
        "GPU us",
        "spread",
        "floor us",
        "x floor",
        "TB/s",
        "TFLOP/s",
        "goal us",
        "aim us",
        *EAGER_HEADER,
    )

    @property
    def title(self) -> str:
        """The case in words."""
        case = self.case
        rows = ", compressed rows" if case.compressed else ""
        return f"{case.form} {case.keys}, {case.heads} heads, {case.batch} x {case.next_n} over {case.kv_tokens}{rows}"

    @property
    def goals_us(self) -> tuple[float, float] | None:
        """GPU time to reach and to aim at; None without one."""
        case = self.case
        if self.device != GOAL_DEVICE or (case.keys, case.dim, case.score) != ("fp8", 128, "fp32"):
            return None
        return GOALS_US.get((case.form, case.heads, case.batch, case.next_n, case.kv_tokens))

    @property
    def missed(self) -> tuple[str, ...]:
        """Goals that are not reached, in words."""
        goals = self.goals_us
        if goals is None or self.gpu_us <= goals[0]:
            return ()
        return (f"{self.gpu_us:.1f} us, goal {goals[0]:.1f} us",)

    @property
    def bytes_per_s(self) -> float:
        """Bytes of keys and scores per second of GPU time."""
        return (self.case.read_bytes + self.case.write_bytes) / self.gpu_us * 1e6

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations of the products per second of GPU time."""
        return self.case.flops / self.gpu_us * 1e6

    def cells(self) -> tuple[str, ...]:
        """The table's row."""
        case, goals = self.case, self.goals_us or (None, None)
        return (
            case.form + (" compressed" if case.compressed else ""),
            case.keys,
            str(case.heads),
            str(case.batch),
            str(case.next_n),
            str(case.kv_tokens),
            f"{self.gpu_us:.1f}",
            f"{self.spread:.1%}",
            number(self.floor_us, ".2f"),
            number(self.floor_ratio, ".2f"),
            f"{self.bytes_per_s / 1e12:.2f}",
            f"{self.flops_per_s / 1e12:.0f}",
            number(goals[0], ".1f"),
            number(goals[1], ".1f"),
            *self._eager_cells(),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence."""
        own = {
            "tb_per_s": round(self.bytes_per_s / 1e12, 3),
            "tflops_per_s": round(self.flops_per_s / 1e12, 1),
            "goals_us": None if self.goals_us is None else list(self.goals_us),
        }
        return self._plain(asdict(self.case), own)
