"""What a measurement says: the floor that a case cannot beat, rates, and whether it got slower than the last record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from dsagen.arch import ARCHS, Arch, DeviceFigures
from dsagen.bench.data import DecodeCase
from dsagen.plan import KernelPlan
from dsagen.slug import parse_slug
from dsagen.spec import DeploymentSpec

CaseKey = tuple[tuple[str, Any], ...]

# A run is called slower than the record beyond this share, which is above what replays of one build differ by.
SLOWER_BY = 0.05
# The last columns of a table of calls.
EAGER_HEADER = ("issue us", "wall us", "last us")


@dataclass(frozen=True)
class PeerFigure:
    """One peer on one case: its GPU time per call, or None with the reason in `note`."""

    name: str
    label: str
    version: str
    gpu_us: float | None
    note: str = ""


class Figures(Protocol):
    """One case of any op on one device, as a table, a record and a comparison need it."""

    @property
    def op(self) -> str:
        """The measured op."""

    @property
    def spec(self) -> str:
        """Name of the spec."""

    @property
    def device(self) -> str:
        """Name that the driver gives."""

    @property
    def arch(self) -> str:
        """Arch of the kernels that ran."""

    @property
    def gpu_us(self) -> float:
        """GPU time per call."""

    @property
    def peers(self) -> tuple[PeerFigure, ...]:
        """Other libraries on the same inputs."""

    @property
    def record_us(self) -> float | None:
        """GPU time of the last record, None without one."""

    @property
    def slower(self) -> bool:
        """Whether the case takes notably longer than its last record."""

    @property
    def missed(self) -> tuple[str, ...]:
        """Goals that are not reached, in words."""

    @property
    def title(self) -> str:
        """The case in words, such as "batch 4"."""

    @property
    def header(self) -> tuple[str, ...]:
        """Titles of the table's columns."""

    def cells(self) -> tuple[str, ...]:
        """The table's row."""

    def measured_spec(self, spec: DeploymentSpec) -> DeploymentSpec:
        """The spec whose kernels ran, of the spec that was asked for."""

    def took_part(self, plan: KernelPlan) -> bool:
        """Whether a kernel ran in the case."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence; the case under "case", its GPU time under "gpu_us"."""


class Compared:
    """A GPU time beside its floor and its last record, where there are such."""

    gpu_us: float
    floor_us: float | None
    record_us: float | None

    @property
    def floor_ratio(self) -> float | None:
        """GPU time over the floor."""
        return None if self.floor_us is None else self.gpu_us / self.floor_us

    @property
    def slower(self) -> bool:
        """Whether the case takes notably longer than its last record."""
        return is_slower(self.gpu_us, self.record_us)


@dataclass(frozen=True)
class CallFigures(Compared):
    """What the figures of a call have in common; an op's add its case and what else was measured.

    `gpu_us` is GPU time per call from graph replay over `input_sets` input sets, `spread` its relative p10..p90
    distance; `issue_us` and `wall_us` are CPU and wall time of an eager call. `floor_us` is None on a device without
    measured ceilings, `record_us` without an earlier record. `slugs` name the kernels that may have run.
    """

    spec: str
    slugs: tuple[str, ...]
    device: str
    arch: str
    gpu_us: float
    spread: float
    input_sets: int
    issue_us: float
    wall_us: float
    floor_us: float | None
    peers: tuple[PeerFigure, ...] = field(default=(), kw_only=True)
    record_us: float | None = field(default=None, kw_only=True)

    @property
    def missed(self) -> tuple[str, ...]:
        """Goals that are not reached, in words; none unless an op has some."""
        return ()

    def measured_spec(self, spec: DeploymentSpec) -> DeploymentSpec:
        """The spec itself."""
        return spec

    def took_part(self, plan: KernelPlan) -> bool:
        """Whether it is one of the case's kernels."""
        return plan.slug in self.slugs

    def _eager_cells(self) -> tuple[str, ...]:
        """The last columns of a row, EAGER_HEADER."""
        return f"{self.issue_us:.1f}", f"{self.wall_us:.1f}", number(self.record_us, ".1f")

    def _plain(self, case: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Plain data for `--json` and evidence, with what the op alone has."""
        return {
            "spec": self.spec,
            "slugs": list(self.slugs),
            "device": self.device,
            "case": case,
            "gpu_us": round(self.gpu_us, 3),
            "spread": round(self.spread, 4),
            "input_sets": self.input_sets,
            "issue_us": round(self.issue_us, 2),
            "wall_us": round(self.wall_us, 2),
            "floor_us": None if self.floor_us is None else round(self.floor_us, 3),
            **own,
            "missed": list(self.missed),
            "record_us": self.record_us,
            "peers": [asdict(peer) for peer in self.peers],
        }


@dataclass(frozen=True)
class DecodeFigures(Compared):
    """One case on one device.

    `gpu_us` is GPU time per call from graph replay with cold inputs, `spread` its relative p10..p90 distance;
    `issue_us` and `wall_us` are CPU and wall time of an eager call. `ctas` are those of the main kernel. `floor_us` is
    None on a device without measured ceilings, `record_us` None without an earlier record. `launches` are those of a
    call whose rows are split.
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
    launches: int = 2

    op: ClassVar[str] = "sparse_decode"
    header: ClassVar[tuple[str, ...]] = (
        "batch",
        "topk",
        "GPU us",
        "spread",
        "floor us",
        "x floor",
        "TB/s",
        "TFLOP/s",
        "CTAs",
        "SMs",
        "splits",
        *EAGER_HEADER,
    )

    @property
    def arch(self) -> str:
        """Arch of the kernels that ran."""
        return parse_slug(self.slug).arch

    @property
    def missed(self) -> tuple[str, ...]:
        """None are set."""
        return ()

    @property
    def title(self) -> str:
        """The case in words."""
        return f"batch {self.case.batch}, topk {self.case.width}"

    def cells(self) -> tuple[str, ...]:
        """The table's row."""
        return (
            str(self.case.batch),
            self.case.width,
            f"{self.gpu_us:.1f}",
            f"{self.spread:.1%}",
            number(self.floor_us, ".1f"),
            number(self.floor_ratio, ".2f"),
            f"{self.record_bytes_per_s / 1e12:.2f}",
            f"{self.flops_per_s / 1e12:.0f}",
            str(self.ctas),
            number(self.active_sms, "d"),
            str(self.num_splits),
            f"{self.issue_us:.1f}",
            f"{self.wall_us:.1f}",
            number(self.record_us, ".1f"),
        )

    def measured_spec(self, spec: DeploymentSpec) -> DeploymentSpec:
        """The spec itself."""
        return spec

    def took_part(self, plan: KernelPlan) -> bool:
        """The main kernel, and the combine where rows were split and another launch combined them."""
        combines = (plan.variant.family, plan.variant.kernel) == (self.op, "combine")
        return plan.slug == self.slug or (combines and self.num_splits > 1 and self.launches > 1)

    @property
    def active_sms(self) -> int | None:
        """SMs that the main kernel's CTAs reach at once; None on a device of unknown SM count."""
        ceilings = ceilings_of(self.device)
        return None if ceilings is None else min(self.ctas, ceilings.sm_count)

    @property
    def record_bytes_per_s(self) -> float:
        """Bytes of the selected cache rows per second of GPU time."""
        return self.case.kv_bytes / self.gpu_us * 1e6

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations per second of GPU time."""
        return self.case.flops / self.gpu_us * 1e6

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json` and evidence."""
        return {
            "spec": self.spec,
            "slug": self.slug,
            "device": self.device,
            "case": self.case.to_json(),
            "num_splits": self.num_splits,
            "ctas": self.ctas,
            "active_sms": self.active_sms,
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


def is_slower(gpu_us: float, record_us: float | None) -> bool:
    """Whether a time exceeds its last record by more than replays of one build differ."""
    return record_us is not None and gpu_us > record_us * (1 + SLOWER_BY)


def number(value: float | None, form: str) -> str:
    """A table's cell; "-" where there is no value."""
    return "-" if value is None else format(value, form)


def floor_us(case: DecodeCase, figures: DeviceFigures) -> float:
    """The larger of the time for the floating-point operations and the time to read the selected rows, in us."""
    compute_s = case.flops / figures.bf16_flops_per_second
    return max(compute_s, case.kv_bytes / figures.dram_read_bytes_per_second) * 1e6


def figures_of(device: str, arch: Arch) -> DeviceFigures | None:
    """The measured ceilings of a device, by the name that its driver gives; None where nothing was measured."""
    return next((figures for figures in arch.figures if figures.device == device), None)


def ceilings_of(device: str) -> DeviceFigures | None:
    """The same by the device's name alone."""
    return next((found for arch in ARCHS.values() if (found := figures_of(device, arch)) is not None), None)


def case_key(case: Mapping[str, Any]) -> CaseKey:
    """What makes two recorded cases the same one."""
    return tuple(sorted(case.items()))
