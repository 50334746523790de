"""Evidence: what ran on a device, as rows that a changed instruction loses and a changed comment keeps.

Rows lie in JSON-lines files, one per device kind: shipped ones (read-only) in the package or in tests/evidence of a
checkout, a user's own in `evidence/` of the kernel store. A row belongs to a kernel when the hash of its text without
comments, its arch and the flags that change code agree.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dsagen import knobs
from dsagen.build import Store, StoreEntry
from dsagen.build.key import compile_flags
from dsagen.emulator import DEVICE as EMULATOR  # rows of emulated runs carry it as their device
from dsagen.errors import StoreError
from dsagen.output_paths import require_appendable, require_folder
from dsagen.render import RenderedUnit

_LOG = logging.getLogger(__name__)

Kind = Literal["conformance", "benchmark", "sanitizer"]
KINDS: tuple[Kind, ...] = ("conformance", "benchmark", "sanitizer")
# Flags that leave every instruction as it is: line tables, what is printed, which output is kept.
_INERT_FLAGS = frozenset({"-ptx", "-lineinfo", "--generate-line-info", "-v", "-warn-spills", "-warn-lmem-usage"})


@dataclass(frozen=True)
class EvidenceRow:
    """One run for one kernel.

    `passed`, `failed` and `not_run` count cases of a conformance or sanitizer run. `worst` are its largest errors,
    `figures` what a benchmark measured. `toolchain` is like "nvcc 13.0.88", `date` UTC in ISO form.
    """

    evidence_hash: str
    arch: str
    flags: tuple[str, ...]
    slug: str
    kind: Kind
    device: str
    spec: str
    toolchain: str
    driver: str
    date: str
    tier: str = ""
    seed: int | None = None
    passed: int = 0
    failed: int = 0
    not_run: int = 0
    worst: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.passed > 0 and self.failed == 0

    def matches(self, unit: RenderedUnit) -> bool:
        """Whether the row was recorded for these instructions."""
        return (self.evidence_hash, self.arch, self.flags) == (unit.evidence_hash, unit.arch, code_flags(unit.arch))

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False) + "\n"


class Rung(IntEnum):
    """How far a kernel is proven, lowest first."""

    PLANNED = 0
    COMPILED = 1
    EMULATED = 2
    CONFORMANT = 3
    BENCHMARKED = 4


@dataclass(frozen=True)
class RungStatus:
    """The highest rung of a kernel, where it was reached, and what qualifies it (another toolchain, a failed check)."""

    rung: Rung
    devices: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        where = f" on {', '.join(self.devices)}" if self.devices else ""
        return f"{self.rung.name.lower()}{where}{f' ({self.note})' if self.note else ''}"


def code_flags(arch: str) -> tuple[str, ...]:
    """Flags, and variables that nvcc reads by itself, that may change the instructions compiled for an arch."""
    flags = compile_flags(arch)
    environment = knobs.code_changing_environment()
    kept = [flag for flag in (*flags.nvcc, *flags.ptxas) if flag not in _INERT_FLAGS]
    return (*kept, *(f"{name}={environment[name]}" for name in sorted(environment)))


def row_for(unit: RenderedUnit, kind: Kind, **columns: Any) -> EvidenceRow:
    """A row for a unit, dated now; `columns` are the fields that the unit does not give."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return EvidenceRow(
        evidence_hash=unit.evidence_hash,
        arch=unit.arch,
        flags=code_flags(unit.arch),
        slug=unit.slug,
        kind=kind,
        **{"date": now, **columns},
    )


def record(rows: Sequence[EvidenceRow], file: Path | None = None, store: Store | None = None) -> tuple[Path, ...]:
    """Append rows to `file`, or to the store's file of each device kind; the files that were written.

    Raises StoreError when the place cannot be written, or is the package's own evidence.
    """
    folder = None if file is not None else _own_folder(store)
    by_file: dict[Path, list[EvidenceRow]] = {}
    for row in rows:
        by_file.setdefault(file or Path(str(folder)) / f"{device_kind(row.device)}.jsonl", []).append(row)
    for path, members in by_file.items():
        _require_outside_package(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as handle:
                # One write, so that two processes do not interleave lines.
                handle.write("".join(row.to_line() for row in members))
        except OSError as error:
            raise StoreError(f"{path}: evidence cannot be written ({error.strerror})") from None
    return tuple(by_file)


def require_recordable(file: Path | None = None, store: Store | None = None) -> None:
    """Refuse ahead of a run what `record` would after it, with the same arguments: StoreError."""
    if file is None:
        require_folder(_own_folder(store), "evidence")
        return
    _require_outside_package(file)
    require_appendable(file, "evidence")


def _own_folder(store: Store | None) -> Path:
    return (store or Store.open()).writable_root() / "evidence"


def _require_outside_package(file: Path) -> None:
    if file.resolve().is_relative_to(_packaged_folder().resolve()):
        raise StoreError(f"{file}: evidence inside the installed package is read-only: name another file")


def load_evidence(store: Store | None = None) -> tuple[EvidenceRow, ...]:
    """Shipped rows, and those of a store where one is given. A line that is no row is logged and left out."""
    folders = [shipped_folder(), *((root / "evidence" for root in store.roots) if store else ())]
    return tuple(row for folder in folders for path in _row_files(folder) for row in read_rows(path))


def _row_files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*.jsonl"))
    except OSError as error:
        _LOG.warning("%s: evidence cannot be read (%s)", folder, error.strerror)
        return []


def read_rows(path: Path) -> tuple[EvidenceRow, ...]:
    """The rows of one file; one that cannot be read is logged and has none."""
    try:
        # A pipe would be waited for.
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    except OSError:
        text = None
    if text is None:
        _LOG.warning("%s: no file of evidence that can be read", path)
        return ()
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(_parse(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            _LOG.warning("%s:%d: no evidence row (%s)", path, number, error)
    return tuple(rows)


def rung(unit: RenderedUnit, rows: Iterable[EvidenceRow], entry: StoreEntry | None = None) -> RungStatus:
    """The highest rung of a unit, by the rows that match it and its store entry, if it is compiled.

    Of several conformance runs on one device the last decides. A benchmark counts only where the kernel is conformant.
    """
    own = sorted((row for row in rows if row.matches(unit)), key=lambda row: row.date)
    last = {row.device: row for row in own if row.kind == "conformance"}
    conformant = tuple(name for name, row in last.items() if row.clean and name != EMULATOR)
    benchmarks = {row.device: row for row in own if row.kind == "benchmark" and row.device in conformant}
    broken = [name for name, row in last.items() if row.failed]
    note = f"last check on {', '.join(broken)} failed" if broken else ""
    if benchmarks:
        return RungStatus(Rung.BENCHMARKED, tuple(benchmarks), note or _toolchain_note(benchmarks.values(), entry))
    if conformant:
        return RungStatus(Rung.CONFORMANT, conformant, note or _toolchain_note((last[n] for n in conformant), entry))
    if EMULATOR in last and last[EMULATOR].clean:
        return RungStatus(Rung.EMULATED, note=note)
    return RungStatus(Rung.COMPILED if entry is not None else Rung.PLANNED, note=note)


def device_kind(device: str) -> str:
    """File stem for a device name: "NVIDIA H200" gives "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"


def shipped_folder() -> Path:
    """Where shipped evidence lies: in the installed package, else in the checkout."""
    packaged = _packaged_folder()
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "tests" / "evidence"


@cache
def _packaged_folder() -> Path:
    return Path(__file__).parent / "_data" / "evidence"


def _toolchain_note(rows: Iterable[EvidenceRow], entry: StoreEntry | None) -> str:
    if entry is None:
        return ""
    own = f"nvcc {entry.nvcc_version}"
    recorded = sorted({row.toolchain for row in rows})
    return "" if own in recorded else f"recorded with {', '.join(recorded)}, this one is of {own}"


def _parse(line: str) -> EvidenceRow:
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError("not an object")
    unknown = set(data) - {f.name for f in fields(EvidenceRow)}
    if unknown:
        raise ValueError(f"unknown columns {sorted(unknown)}")
    if data["kind"] not in KINDS:
        raise ValueError(f"unknown kind {data['kind']!r}")
    row = EvidenceRow(**{**data, "flags": tuple(data["flags"])})
    for f in fields(EvidenceRow):
        if not _COLUMN_CHECKS.get(f.name, _is_line)(getattr(row, f.name)):
            raise ValueError(f"column {f.name} holds {getattr(row, f.name)!r:.60}")
    return row


def _is_line(value: object) -> bool:
    return isinstance(value, str) and (not value or value.isprintable())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# What a column may hold; the others are a line of text.
_COLUMN_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "flags": lambda value: isinstance(value, tuple) and all(map(_is_line, value)),
    "seed": lambda value: value is None or _is_count(value),
    "passed": _is_count,
    "failed": _is_count,
    "not_run": _is_count,
    "worst": lambda value: isinstance(value, dict),
    "figures": lambda value: isinstance(value, dict),
}
