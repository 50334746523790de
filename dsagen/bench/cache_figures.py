"""What a measurement of the caches' writers and readers says: bytes that rows move, and the floor of moving them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dsagen.bench.figures import PeerFigure, is_slower, number
from dsagen.plan import KernelPlan
from dsagen.spec import DeploymentSpec


@dataclass(frozen=True)
class CacheBenchCase:
    """One call of `kv_cache` or `index_cache`: `rows` of a cache in `format_id`, in pages of `page_size`."""

    op: str
    action: str
    format_id: str
    rows: int
    page_size: int = 64
    extra: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data; rows are called tokens, for what draws other ops goes by theirs."""
        plain = asdict(self)
        rows = plain.pop("rows")
        return {**plain, "cache_rows": rows}


@dataclass(frozen=True)
class CacheFigures:
    """One call on one device.

    `gpu_us` is GPU time per call from graph replay over `input_sets` input sets, `spread` its relative p10..p90
    distance; `moved_bytes` is what its rows read and write once each, `floor_us` that at the device's read rate, None
    where it was not measured. `issue_us` and `wall_us` are CPU and wall time of an eager call.
    """

    spec: str
    slugs: tuple[str, ...]
    device: str
    arch: str
    case: CacheBenchCase
    gpu_us: float
    spread: float
    input_sets: int
    moved_bytes: int
    issue_us: float
    wall_us: float
    floor_us: float | None
    record_us: float | None = None
    peers: tuple[PeerFigure, ...] = ()
    missed: tuple[str, ...] = ()

    header: ClassVar[tuple[str, ...]] = (
        "call",
        "format",
        "rows",
        "GPU us",
        "spread",
        "floor us",
        "x floor",
        "GB/s",
        "issue us",
        "wall us",
        "last us",
    )

    @property
    def op(self) -> str:
        """The measured op."""
        return self.case.op

    @property
    def title(self) -> str:
        """The case in words."""
        return f"{self.case.op} {self.case.action}, {self.case.rows} rows of {self.case.format_id}"

    @property
    def bytes_per_s(self) -> float:
        """Bytes moved per second of GPU time."""
        return self.moved_bytes / self.gpu_us * 1e6

    @property
    def floor_ratio(self) -> float | None:
        """GPU time over the floor."""
        return None if self.floor_us is None else self.gpu_us / self.floor_us

    @property
    def slower(self) -> bool:
        """Whether the case takes notably longer than its last record."""
        return is_slower(self.gpu_us, self.record_us)

    def cells(self) -> tuple[str, ...]:
        """The table's row."""
        return (
            self.case.action,
            self.case.format_id,
            str(self.case.rows),
            f"{self.gpu_us:.1f}",
            f"{self.spread:.1%}",
            number(self.floor_us, ".2f"),
            number(self.floor_ratio, ".2f"),
            f"{self.bytes_per_s / 1e9:.0f}",
            f"{self.issue_us:.1f}",
            f"{self.wall_us:.1f}",
            number(self.record_us, ".1f"),
        )

    def measured_spec(self, spec: DeploymentSpec) -> DeploymentSpec:
        """The spec itself."""
        return spec

    def took_part(self, plan: KernelPlan) -> bool:
        """Whether it is the case's kernel."""
        return plan.slug in self.slugs

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence."""
        return {
            "spec": self.spec,
            "slugs": list(self.slugs),
            "device": self.device,
            "case": self.case.to_json(),
            "gpu_us": round(self.gpu_us, 3),
            "spread": round(self.spread, 4),
            "input_sets": self.input_sets,
            "moved_bytes": self.moved_bytes,
            "gb_per_s": round(self.bytes_per_s / 1e9, 1),
            "issue_us": round(self.issue_us, 2),
            "wall_us": round(self.wall_us, 2),
            "floor_us": None if self.floor_us is None else round(self.floor_us, 3),
            "missed": [],
            "record_us": self.record_us,
            "peers": [],
        }
