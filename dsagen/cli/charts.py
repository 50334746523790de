"""Charts as SVG text: shared memory to scale, and recorded measurements under their roofs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from dsagen.plan import KernelPlan

WIDTH, HEIGHT = 840, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 270, 18, 46
_LABEL_STEP = 14
_HUES = (210, 30, 140, 280, 0, 60, 170, 320)


@dataclass(frozen=True)
class Point:
    """One measurement: where it lies, and what is written beside it."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Roof:
    """What cannot be exceeded: a height for every x."""

    height: Callable[[float], float]
    label: str


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis from whole powers of ten to whole powers of ten."""

    least: float
    most: float
    begin: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float) -> _Scale:
        least = math.floor(math.log10(min(values)))
        most = math.ceil(math.log10(max(values)))
        return cls(least, max(most, least + 1), begin, end)

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.least) / (self.most - self.least)
        return self.begin + share * (self.end - self.begin)

    @property
    def decades(self) -> list[int]:
        return list(range(int(self.least), int(self.most) + 1))


def roofline(points: Sequence[Point], roofs: Sequence[Roof], x_title: str, y_title: str, title: str) -> str:
    """Points in a doubly logarithmic plane below the lowest of the roofs; empty without a point."""
    points = [point for point in points if point.x > 0 and point.y > 0]
    if not points:
        return ""
    xs = [point.x for point in points]
    x_scale = _Scale.over([min(xs) / 3, max(xs) * 3], _LEFT, WIDTH - _RIGHT)
    edges = [10**decade for decade in (x_scale.least, x_scale.most)]
    tops = [min(roof.height(x) for roof in roofs) for x in [*xs, *edges]] if roofs else []
    y_scale = _Scale.over(
        [*(point.y / 2 for point in points), *(point.y for point in points), *tops], HEIGHT - _BOTTOM, _TOP
    )
    parts = [
        _axes(x_scale, y_scale, x_title, y_title),
        _roof_line(roofs, x_scale, y_scale),
        _dots(points, x_scale, y_scale),
    ]
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" class="chart">'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"


def _axes(x_scale: _Scale, y_scale: _Scale, x_title: str, y_title: str) -> str:
    parts = []
    for decade in x_scale.decades:
        x = x_scale.place(10**decade)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, HEIGHT - _BOTTOM + 16, _power(decade), "middle"))
    for decade in y_scale.decades:
        y = y_scale.place(10**decade)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, _power(decade), "end"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x_title, "middle"))
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    parts.append(f'<text x="14" y="{middle:.1f}" text-anchor="middle" {turned}>{escape(y_title)}</text>')
    return "".join(parts)


def _roof_line(roofs: Sequence[Roof], x_scale: _Scale, y_scale: _Scale) -> str:
    """The lowest roof everywhere, named at the places where each is the lowest."""
    if not roofs:
        return ""
    steps = 200
    xs = [10 ** (x_scale.least + (x_scale.most - x_scale.least) * step / steps) for step in range(steps + 1)]
    lowest = [min(roofs, key=lambda roof: roof.height(x)) for x in xs]
    places = [(x_scale.place(x), y_scale.place(roof.height(x))) for x, roof in zip(xs, lowest, strict=True)]
    inside = [(x, y) for x, y in places if _TOP <= y <= HEIGHT - _BOTTOM]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in inside)
    parts = [f'<polyline class="roof" points="{line}"/>']
    for roof in roofs:
        own = [place for place, low in zip(places, lowest, strict=True) if low is roof and place in inside]
        if own:
            x, y = own[len(own) // 2]
            parts.append(_text(x - 6, y - 7, roof.label, "end", "roof-label"))
    return "".join(parts)


def _dots(points: Sequence[Point], x_scale: _Scale, y_scale: _Scale) -> str:
    placed = sorted(((x_scale.place(point.x), y_scale.place(point.y), point) for point in points), key=lambda p: p[1])
    parts = []
    free = float(_TOP)
    for x, y, point in placed:
        # Labels stand in a column at the right, each at its dot's height or below the label before.
        at = max(y, free)
        free = at + _LABEL_STEP
        column = WIDTH - _RIGHT + 14
        parts.append(f'<polyline class="leader" points="{x + 5:.1f},{y:.1f} {column - 4},{at:.1f}"/>')
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(point.label)}</title></circle>'
        )
        parts.append(_text(column, at + 4, point.label, "start"))
    return "".join(parts)


def memory_map(plan: KernelPlan) -> str:
    """Shared memory as one bar to scale, a box per member; empty where there is none."""
    if not plan.smem:
        return ""
    height, total = 44, plan.smem_bytes
    parts = []
    for number, field in enumerate(plan.smem):
        x, width = field.offset_bytes / total * WIDTH, max(1.0, field.size_bytes / total * WIDTH)
        text = f"{field.name}: {field.offset_bytes} .. {field.last_byte}, {field.size_bytes} B, {field.note}"
        hue = _HUES[number % len(_HUES)]
        parts.append(
            f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="{height}" style="fill:hsl({hue} 55% 62%)">'
            f"<title>{escape(text)}</title></rect>"
        )
        if width > 8 * len(field.name):
            parts.append(_text(x + width / 2, height / 2 + 4, field.name, "middle", "box-label"))
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="shared memory to scale" class="bar">'
    return f"{head}{''.join(parts)}</svg>"


def share_bar(taken: int, total: int) -> str:
    """A bar that is filled as far as a resource is taken."""
    width = min(taken / total, 1.0) * 240
    return (
        f'<svg viewBox="0 0 240 12" class="share" role="img" aria-label="{taken} of {total}">'
        f'<rect class="share-back" width="240" height="12"/>'
        f'<rect class="share-front" width="{width:.1f}" height="12"/></svg>'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{escape(text)}</text>'


def _power(decade: int) -> str:
    return f"{10.0**decade:g}" if -3 <= decade <= 4 else f"1e{decade}"
