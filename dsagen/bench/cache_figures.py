"""What a measurement of the caches' writers and readers says: bytes that rows move, and the floor of moving them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dsagen.bench.figures import EAGER_HEADER, CallFigures, number


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
class CacheFigures(CallFigures):
    """One call on one device.

    `moved_bytes` is what its rows read and write once each, and `floor_us` that at the device's read rate.
    """

    case: CacheBenchCase
    moved_bytes: int

    header: ClassVar[tuple[str, ...]] = (
        "call",
        "format",
        "rows",
        "GPU us",
        "spread",
        "floor us",
        "x floor",
        "GB/s",
        *EAGER_HEADER,
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
            *self._eager_cells(),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence."""
        own = {
            "moved_bytes": self.moved_bytes,
            "gb_per_s": round(self.bytes_per_s / 1e9, 1),
        }
        return self._plain(self.case.to_json(), own)
