"""Named lists of sparse-decode shapes, one JSON object a line, and the cases and specs that they stand for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsagen.bench.cases import KV_TOKENS, PAGE_SIZE, require_measurable
from dsagen.bench.data import DecodeCase
from dsagen.errors import SpecError
from dsagen.spec import DeploymentSpec

_SIZES = ("batch", "s_q", "topk", "heads")


@dataclass(frozen=True)
class Shape:
    """`batch` requests of `s_q` query tokens, `topk` columns of an index row, `heads` query heads on this rank.

    `corner` says why the shape is in its list, where that is not obvious.
    """

    batch: int
    s_q: int
    topk: int
    heads: int
    corner: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """What makes two shapes the same one."""
        return tuple(getattr(self, name) for name in _SIZES)

    @property
    def title(self) -> str:
        """The shape in words."""
        sizes = f"b {self.batch}, s_q {self.s_q}, topk {self.topk}, {self.heads} heads"
        return f"{sizes} ({self.corner})" if self.corner else sizes


def shipped_lists() -> dict[str, Path]:
    """Lists that come with the package, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.jsonl"))}


def load_shapes(name: str) -> tuple[Shape, ...]:
    """The shapes of a shipped list, or of a file; SpecError that names the file's line and field otherwise."""
    path = shipped_lists().get(name, Path(name))
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read as text ({error}); expected one JSON object a line") from None
    if text is None:
        raise SpecError(f"{name}: no file, and no list of shapes of that name: there is {', '.join(shipped_lists())}")
    found: dict[tuple[int, ...], int] = {}
    shapes = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        shape = _parse(f"{path}:{number}", line)
        if shape.sizes in found:
            raise SpecError(f"{path}:{number}: {shape.title} stands in line {found[shape.sizes]} already: remove one")
        found[shape.sizes] = number
        shapes.append(shape)
    if not shapes:
        raise SpecError(f"{path}: holds no shape; expected lines such as {_example()}")
    return tuple(shapes)


def specs_of(spec: DeploymentSpec, shapes: Sequence[Shape]) -> list[DeploymentSpec]:
    """The spec with each head count of the shapes.

    SpecError for a spec that is not measured, that cannot have the heads or the columns of a shape, or for a shape that
    cannot be drawn.
    """
    require_measurable(spec)
    for shape in shapes:
        case_of(spec, shape)
        if shape.topk > spec.topk:
            raise SpecError(
                f"{spec.name}: takes at most {spec.topk} columns of an index row (its topk), and a shape has "
                f"{shape.topk}: {shape.title}; raise the spec's topk or leave the shape out"
            )
    return [
        spec if heads == spec.heads else spec.replace(heads=heads, name=f"{spec.name}_heads{heads}")
        for heads in dict.fromkeys(shape.heads for shape in shapes)
    ]


def case_of(spec: DeploymentSpec, shape: Shape) -> DecodeCase:
    """The shape over the main cache of a spec, with sequences as long as those of the benchmark's own cases."""
    return DecodeCase(spec.kv.format_id, shape.heads, shape.batch, shape.s_q, shape.topk, KV_TOKENS, PAGE_SIZE)


def _parse(where: str, line: str) -> Shape:
    try:
        plain: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: no JSON ({error}); expected such as {_example()}") from None
    if not isinstance(plain, dict):
        raise SpecError(f"{where}: {line.strip()[:60]}: no JSON object; expected such as {_example()}")
    known = {field.name for field in fields(Shape)}
    for key in plain:
        if key not in known:
            raise SpecError(f"{where}: unknown field {key!r}; fields are {', '.join(_SIZES)} and corner")
    for key in _SIZES:
        value = plain.get(key)
        if type(value) is not int or value < 1:
            raise SpecError(f"{where}: {key}: {value!r} is no whole number of 1 or more")
    if not isinstance(plain.get("corner", ""), str):
        raise SpecError(f"{where}: corner: {plain['corner']!r} is no text")
    return Shape(**plain)


def _example() -> str:
    return json.dumps({"batch": 1, "s_q": 1, "topk": 2048, "heads": 16})
