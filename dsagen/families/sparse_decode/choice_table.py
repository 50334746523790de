"""Choice tables: which kernel and how many splits a device was measured to be fastest with, as data.

A table is a file of JSON lines, each a `ChoiceRow`; `dsagen tune` writes it. Read are the file that DSAGEN_CHOICE_TABLE
names, else those in `choices/` of the store's folders and then the shipped ones beside this module. A row counts for
the kernel whose text it was measured with, on devices of its name; the first that covers a shape decides.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dsagen import knobs
from dsagen.errors import KnobError, SpecError, TableError
from dsagen.families.sparse_decode.op import DecodeShape, Determinism
from dsagen.plan import KernelPlan
from dsagen.slug import parse_slug

FOLDER = "choices"
_MOST_BYTES = 16 << 20
_MOST_INT = (1 << 31) - 1
# What to do about a table that was found in a folder.
_ADVICE = f"correct it, remove it, or set {knobs.CHOICE_TABLE.name}"
Range = tuple[int, int]


@dataclass(frozen=True)
class Alternative:
    """What a row's choice was measured beside. `launches` are those of a call: 1 without a combine of its own."""

    kernel: str
    num_splits: int
    launches: int
    gpu_us: float


@dataclass(frozen=True)
class ChoiceRow:
    """A measured choice for a region of shapes.

    `kernel` is the slug of a main kernel and `text` the hash of its text without comments. `tokens` (batch x s_q),
    `topk` and `extra_topk` are ranges, ends included. `gpu_us` was measured at their upper ends: fewer tokens with as
    many splits never take more rounds of CTAs. `date` is UTC in ISO form, `place` the row's file and line.
    """

    kernel: str
    text: str
    device: str
    driver: str
    toolchain: str
    date: str
    heads: int
    tokens: Range
    topk: Range
    extra_topk: Range
    num_splits: int
    launches: int
    gpu_us: float
    beside: tuple[Alternative, ...] = ()
    place: str = ""

    def covers(self, shape: DecodeShape) -> bool:
        """Whether the shape lies in the row's region. Calls of several KV heads are measured nowhere."""
        sizes = ((shape.rows, self.tokens), (shape.topk, self.topk), (shape.extra_topk, self.extra_topk))
        inside = all(least <= size <= most for size, (least, most) in sizes)
        return inside and shape.heads == self.heads and shape.kv_heads == 1

    @property
    def file(self) -> str:
        """The file of `place`."""
        return self.place.rpartition(":")[0]

    def to_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "place"}

    def to_line(self) -> str:
        """The row as a line of a table."""
        return json.dumps(self.to_json(), sort_keys=True, allow_nan=False) + "\n"

    def describe(self) -> str:
        """What was measured, and beside what, for people."""
        found = f"{_measured(self)} on {self.device}, driver {self.driver}, {self.toolchain}, {self.date[:10]}"
        return "; ".join([found, *(f"{_measured(other)} with {other.kernel}" for other in self.beside)])


@dataclass(frozen=True)
class Decision:
    """What the tables say of a shape: a row, or none, and why rows for its kernels were left out."""

    row: ChoiceRow | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChoiceTables:
    """Rows in the order in which they are asked, and the files that they come from."""

    rows: tuple[ChoiceRow, ...] = ()
    files: tuple[Path, ...] = ()

    def names(self, slug: str) -> bool:
        """Whether a row chooses this kernel, on whatever device."""
        return any(row.kernel == slug for row in self.rows)

    def decide(
        self,
        shape: DecodeShape,
        plans: Sequence[KernelPlan],
        device: str,
        text_of: Callable[[KernelPlan], str],
        determinism: Determinism,
    ) -> Decision:
        """The first row for one of these main kernels, as their text is now, that covers the shape on the device."""
        own = {plan.slug: plan for plan in plans}
        kinds = {_without(slug, "body", "arch") for slug in own}
        ignored: list[str] = []
        for row in self.rows:
            if _without(row.kernel, "body", "arch") not in kinds or not row.covers(shape):
                continue
            reason = _reason(row, own, device, text_of, determinism)
            if not reason:
                return Decision(row, tuple(dict.fromkeys(ignored)))
            ignored.append(f"{row.place}: {reason}")
        return Decision(None, tuple(dict.fromkeys(ignored)))


def _reason(
    row: ChoiceRow,
    own: Mapping[str, KernelPlan],
    device: str,
    text_of: Callable[[KernelPlan], str],
    determinism: Determinism,
) -> str:
    """Why a row that covers a shape does not count; empty where it does."""
    if determinism == "batch_invariant":
        return "batch-invariant specs take neither kernel nor splits from a table, which reads the batch"
    arch = next(iter(own.values())).variant.arch
    if parse_slug(row.kernel).arch != arch:
        return f"measured on {parse_slug(row.kernel).arch}, this is {arch}"
    if row.device != device:
        return f"measured on {row.device}, this is {device}"
    if row.kernel not in own:
        return f"{row.kernel} is not among these kernels ({knobs.SPARSE_DECODE_BODY.name}, or a bundle without it)"
    if row.text != text_of(own[row.kernel]):
        return f"measured with another text of {row.kernel}: run `dsagen tune` again"
    return ""


def read_tables() -> ChoiceTables:
    """The tables in effect. TableError for one that cannot be read or is malformed, KnobError for a bad variable."""
    wanted = knobs.CHOICE_TABLE.get()
    if wanted == knobs.NO_TABLE:
        return ChoiceTables()
    advice = _ADVICE if wanted is None else f"correct it, or unset {knobs.CHOICE_TABLE.name}, which names it"
    files = [Path(wanted)] if wanted is not None else [path for folder in _folders() for path in _files_in(folder)]
    return ChoiceTables(tuple(row for path in files for row in read_table(path, advice)), tuple(files))


def _folders() -> list[Path]:
    roots = knobs.CACHE_DIR.get()
    if not roots:
        # Where no home folder can be told there is no store, which bundles do without.
        with contextlib.suppress(KnobError):
            roots = (knobs.default_cache_dir(),)
    return [*(root / FOLDER for root in roots), shipped_folder()]


def shipped_folder() -> Path:
    """Where shipped tables lie."""
    return Path(__file__).parent / FOLDER


def _files_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*.jsonl"))
    except OSError as error:
        raise TableError(f"{folder}: choice tables cannot be listed ({error.strerror})") from None


def read_table(path: Path, advice: str = _ADVICE) -> tuple[ChoiceRow, ...]:
    """The rows of one file; TableError names file, line, field, value and limit of what is wrong, then the advice."""
    try:
        # A pipe would be waited for.
        if not path.is_file():
            found = "is no regular file" if path.exists() else "no such choice table"
            raise TableError(f"{path}: {found}: {advice}")
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise TableError(f"{path}: {size} B, a choice table has at most {_MOST_BYTES}: {advice}")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TableError(f"{path}: the choice table cannot be read ({error.strerror}): {advice}") from None
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: byte {error.start} is no UTF-8: {advice}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(replace(_parse(line), place=f"{path}:{number}"))
        except (ValueError, RecursionError) as error:
            raise TableError(f"{path}:{number}: {error}: {advice}") from None
    return tuple(rows)


def _parse(line: str) -> ChoiceRow:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    columns = _columns(data, {field.name: _CHECKS[field.name] for field in fields(ChoiceRow) if field.name != "place"})
    row = ChoiceRow(**columns)
    if row.launches > row.num_splits:
        raise ValueError(
            f"field launches: {row.launches} with num_splits {row.num_splits}: expected 1, nothing combines"
        )
    return row


def _columns(data: Any, checks: Mapping[str, Callable[[Any], Any]], where: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'a row'}: expected an object, found {data!r:.60}")
    for name in data:
        if name not in checks:
            raise ValueError(f"field {where}{name}: unknown; known are {', '.join(checks)}")
    found = {}
    for name, convert in checks.items():
        if name not in data:
            raise ValueError(f"field {where}{name}: missing")
        try:
            found[name] = convert(data[name])
        except ValueError as error:
            raise ValueError(f"field {where}{name}: {data[name]!r:.80}: {error}") from None
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("expected a line of text")
    return value


def _main_slug(value: Any) -> str:
    try:
        slug = parse_slug(_text(value))
    except SpecError as error:
        raise ValueError(str(error)) from None
    if (slug.family, slug.kernel) != ("sparse_decode", "main"):
        raise ValueError("expected the slug of a main kernel of sparse_decode")
    return str(slug)


def _whole(value: Any, least: int, most: int = _MOST_INT) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"expected a whole number from {least} to {most}")
    return value


def _range(value: Any, least: int) -> Range:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("expected [first, last]")
    first, last = (_whole(end, least) for end in value)
    if first > last:
        raise ValueError("the first is above the last")
    return first, last


def _microseconds(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 < value <= 1e9:
        raise ValueError("expected microseconds above 0, at most 1e9")
    return float(value)


def _alternatives(value: Any) -> tuple[Alternative, ...]:
    if not isinstance(value, list):
        raise ValueError("expected a list")
    checks = {field.name: _CHECKS[field.name] for field in fields(Alternative)}
    return tuple(Alternative(**_columns(item, checks, f"[{n}].")) for n, item in enumerate(value))


# What each field may hold.
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "kernel": _main_slug,
    **dict.fromkeys(("text", "device", "driver", "toolchain", "date"), _text),
    "heads": lambda value: _whole(value, 1),
    "tokens": lambda value: _range(value, 1),
    "topk": lambda value: _range(value, 1),
    "extra_topk": lambda value: _range(value, 0),
    "num_splits": lambda value: _whole(value, 1),
    "launches": lambda value: _whole(value, 1, 2),
    "gpu_us": _microseconds,
    "beside": _alternatives,
}


def _without(slug: str, *parts: str) -> str:
    """The slug with these parts blotted out, for comparing the rest."""
    found = parse_slug(slug)
    shown = {"body": found.body, "arch": found.arch, **dict.fromkeys(parts, "any")}
    return str(replace(found, body=shown["body"], arch=shown["arch"]))


def _measured(found: ChoiceRow | Alternative) -> str:
    launches = "one launch" if found.launches == 1 else "two launches"
    splits = f"{found.num_splits} split{'s' if found.num_splits > 1 else ''}"
    return f"{found.gpu_us:.2f} us by {splits} in {launches}"
