"""Figures as pictures: time and distance from the floor over the batch, the roofline, selections, and a page of them.

Everything is drawn from what a benchmark prints and records (`to_json`), so a record can be drawn without a device.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsagen.bench.figures import ceilings_of
from dsagen.errors import SpecError, StoreError
from dsagen.output_paths import require_folder

Case = Mapping[str, Any]

_SIZE_INCHES = (8.0, 5.0)
_PANEL_INCHES = (4.0, 3.2)
_DPI = 120
# More than these in one picture cannot be told apart: what is left goes into a next one.
_PANELS = 9
_LINES = 20
# Labels that fit side by side below the narrowest axes.
_TICKS = 9
# Grey is the floor's. A line's colour and marker together are its own up to len(_COLOURS) * len(_MARKERS) lines.
_COLOURS = tuple(
    f"tab:{name}" for name in ("blue", "orange", "green", "red", "purple", "brown", "pink", "olive", "cyan")
)
_MARKERS = "os^vDPX*"
# Axes of a case that are not the batch tell its lines apart, but for what the spec's name or another axis says.
_HIDDEN = ("batch", "kv_format", "heads", "extra_format")


def write_plots(cases: Sequence[Case], folder: Path) -> list[Path]:
    """Draw figures into `folder`, PNG files and index.html; returns the files, the page first.

    SpecError where there is nothing to draw, or matplotlib is not installed; StoreError where a file cannot be written.
    """
    if not cases:
        raise SpecError(
            "nothing to draw: no benchmark of the kernels that these specs have now is recorded; "
            "run `dsagen bench` on a device"
        )
    pyplot = _pyplot()
    try:
        return _draw(pyplot, cases, folder)
    except OSError as error:
        raise StoreError(
            f"--plot {folder!s:.200}: cannot be written ({error.strerror or error}): name a folder that can be"
        ) from None


def require_drawable(folder: Path) -> None:
    """Refuse ahead of measuring what could not be drawn afterwards: SpecError, StoreError."""
    _pyplot()
    require_folder(folder, "--plot's pictures")


def _draw(pyplot: Any, cases: Sequence[Case], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    decode = [case for case in cases if {"kv_format", "batch"} <= set(case["case"])]
    selections = [case for case in cases if "width" in case["case"]]
    pictures: list[tuple[str, Path]] = []

    def draw(name: str, title: str, parts: Sequence[Any], plot: Callable[[Any, Any], Any]) -> None:
        for place, part in enumerate(parts, 1):
            figure = plot(pyplot, part)
            named = title if len(parts) == 1 else f"{title} ({place} of {len(parts)})"
            figure.suptitle(named)
            path = folder / (f"{name}.png" if place == 1 else f"{name}.{place}.png")
            figure.savefig(path)
            pyplot.close(figure)
            pictures.append((named, path))

    for spec, own in _by(decode, "spec").items():
        title = f"{spec} on {own[0]['device']}: GPU time of sparse decode"
        draw(f"{spec}.us", title, _parts(_lines(own), _PANELS), _times)
    if decode:
        device = decode[0]["device"]
        draw(
            "sparse_decode.floor", f"Sparse decode on {device}: GPU time over the floor", _floor_parts(decode), _floors
        )
        parts = _parts(_by(decode, "spec"), _LINES)
        draw("sparse_decode.roofline", f"Sparse decode on {device}: roofline", parts, _roofline)
    for spec, own in _by(selections, "spec").items():
        draw(f"{spec}.topk", f"{spec} on {own[0]['device']}: GPU time of top-k", [own], _selections)
    page = folder / "index.html"
    page.write_text(_page(pictures, cases), encoding="utf-8")
    return [page, *(path for _, path in pictures)]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SpecError("--plot draws with matplotlib, which is not installed: pip install 'dsagen[plots]'") from None
    # Files only: a display is neither needed nor looked for.
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _by(cases: Iterable[Case], key: str) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(str(case[key]), []).append(case)
    return groups


def _parts(lines: Mapping[str, list[Case]], most: int) -> list[dict[str, list[Case]]]:
    """Lines by label, in as few parts of at most `most` lines as there can be."""
    labels = list(lines)
    return [{label: lines[label] for label in labels[at : at + most]} for at in range(0, len(labels), most)]


def _lines(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases by what they share but for the batch, in the order of batches; the label is what differs among lines.

    One batch makes no line.
    """
    keys = sorted({name for case in cases for name in case["case"] if name not in _HIDDEN})
    varying = [name for name in keys if len({str(case["case"].get(name)) for case in cases}) > 1]
    lines: dict[tuple[int, ...], list[Case]] = {}
    for case in sorted(cases, key=lambda case: int(case["case"]["batch"])):
        lines.setdefault(tuple(int(case["case"].get(name) or 0) for name in varying), []).append(case)
    return {
        " ".join(f"{name} {value}" for name, value in zip(varying, values, strict=True) if value): lines[values]
        for values in sorted(lines)
        if len(set(_batches(lines[values]))) > 1
    }


def _batches(cases: Sequence[Case]) -> list[int]:
    return [int(case["case"]["batch"]) for case in cases]


def _style(place: int) -> dict[str, str]:
    """Colour and marker of a picture's line; both change from one to the next, for those who see no colours."""
    row, column = divmod(place, len(_COLOURS))
    return {"color": _COLOURS[column], "marker": _MARKERS[(column + row) % len(_MARKERS)]}


def _over_batches(axes: Any, lines: Iterable[Sequence[Case]]) -> None:
    """Logarithmic axes; the batch's ticks are powers of two, every one or as many as fit, around all batches."""
    batches = {batch for line in lines for batch in _batches(line)}
    low, high = min(batches).bit_length() - 1, (max(batches) - 1).bit_length()
    step = -(-(high - low + 1) // _TICKS)
    ticks = [2**power for power in range(low, high + step, step)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    axes.set_xlabel("batch")
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3)


def _plain_numbers(axis: Any) -> None:
    """1, 2, 5, 10... in place of powers of ten, of which a short axis may hold none."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _beside_its_legend(pyplot: Any, entries: int) -> tuple[Any, Any]:
    """A figure of one pair of axes, as high as a legend of so many entries needs it."""
    width, height = _SIZE_INCHES
    size = (width + 2, max(height, 0.2 * entries + 1))
    figure, axes = pyplot.subplots(figsize=size, dpi=_DPI, layout="constrained")
    return figure, axes


def _times(pyplot: Any, lines: Mapping[str, list[Case]]) -> Any:
    """A panel for each line's shape, in which each library has a line."""
    columns = next(count for count in range(1, _PANELS + 1) if count**2 >= len(lines))
    rows = -(-len(lines) // columns)
    width, height = _PANEL_INCHES
    size = (max(width * columns, _SIZE_INCHES[0]), max(height * rows + 1, _SIZE_INCHES[1]))
    figure, grid = pyplot.subplots(
        rows, columns, figsize=size, dpi=_DPI, layout="constrained", sharey=True, squeeze=False
    )
    labels = dict.fromkeys(peer["label"] for line in lines.values() for case in line for peer in case["peers"])
    styles = {label: _style(place) for place, label in enumerate(labels, 1)}
    panels = list(grid.flat)
    for axes, (label, line) in zip(panels, lines.items(), strict=False):
        _over_batches(axes, lines.values())
        axes.set_title(label, fontsize=9)
        _panel(axes, line, styles)
    for axes in panels[len(lines) :]:
        axes.set_axis_off()
    figure.supylabel("us per call", fontsize=10)
    # A library stands in the legend once, whichever panels it is in.
    entries = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _panel(axes: Any, line: Sequence[Case], styles: Mapping[str, Mapping[str, str]]) -> None:
    """Lines of dsagen, of the peers that `styles` has, and of the floor."""
    axes.plot(_batches(line), [case["gpu_us"] for case in line], "-", lw=2, label="dsagen", **_style(0))
    for peer, style in styles.items():
        points = _peer_points(line, peer)
        if points:
            axes.plot(*zip(*points, strict=True), "--", label=peer, **style)
    floors = [(int(case["case"]["batch"]), case["floor_us"]) for case in line if case["floor_us"]]
    if floors:
        axes.plot(*zip(*floors, strict=True), ":", color="grey", label="floor")


def _peer_points(line: Sequence[Case], label: str) -> list[tuple[int, float]]:
    return [
        (int(case["case"]["batch"]), found["gpu_us"])
        for case in line
        for found in case["peers"]
        if found["label"] == label and found["gpu_us"] is not None
    ]


def _floor_parts(cases: Sequence[Case]) -> list[dict[str, list[Case]]]:
    known = _by((case for case in cases if case["floor_us"]), "spec")
    lines = {f"{spec} {label}".strip(): line for spec, own in known.items() for label, line in _lines(own).items()}
    return _parts(lines, _LINES)


def _floors(pyplot: Any, lines: Mapping[str, list[Case]]) -> Any:
    figure, axes = _beside_its_legend(pyplot, len(lines) + 1)
    _over_batches(axes, lines.values())
    axes.set_ylabel("x floor")
    for place, (label, line) in enumerate(lines.items()):
        ratios = [case["gpu_us"] / case["floor_us"] for case in line]
        axes.plot(_batches(line), ratios, "-", label=label, **_style(place))
    axes.axhline(1.0, color="grey", lw=1, label="floor")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _roofline(pyplot: Any, specs: Mapping[str, list[Case]]) -> Any:
    figure, axes = _beside_its_legend(pyplot, len(specs) + 1)
    for place, (spec, own) in enumerate(specs.items()):
        bytes_per_us = [case["tb_per_s"] * 1e6 for case in own]
        flops_per_us = [case["tflops_per_s"] * 1e6 for case in own]
        intensity = [flops / max(moved, 1.0) for flops, moved in zip(flops_per_us, bytes_per_us, strict=True)]
        axes.plot(
            intensity, [case["tflops_per_s"] for case in own], linestyle="", alpha=0.7, label=spec, **_style(place)
        )
    ceilings = ceilings_of(str(next(iter(specs.values()))[0]["device"]))
    if ceilings is not None:
        low, high = axes.get_xlim()
        peak, rate = ceilings.bf16_flops_per_second / 1e12, ceilings.dram_read_bytes_per_second / 1e12
        xs = sorted({low / 1.5, peak / rate, max(high * 1.5, peak / rate * 2)})
        axes.plot(xs, [min(peak, x * rate) for x in xs], "-", color="grey", label="measured ceilings")
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_numbers(axes.xaxis)
    _plain_numbers(axes.yaxis)
    axes.set_xlabel("FLOP per byte of selected cache rows")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _selections(pyplot: Any, cases: Sequence[Case]) -> Any:
    rows = list(reversed(cases))
    width, height = _SIZE_INCHES
    size = (width + 2, max(height, 0.13 * len(rows) + 1.5))
    figure, axes = pyplot.subplots(figsize=size, dpi=_DPI, layout="constrained")
    names = ["{rows} x {width} {score}, k {k}, {mode}".format(**case["case"]) for case in rows]
    places = list(range(len(rows)))
    axes.barh(places, [case["gpu_us"] for case in rows], height=0.6, color="tab:blue", alpha=0.7, label="dsagen")
    for number, peer in enumerate(dict.fromkeys(peer["label"] for case in rows for peer in case["peers"]), 1):
        points = [
            (found["gpu_us"], place)
            for place, case in zip(places, rows, strict=True)
            for found in case["peers"]
            if found["label"] == peer and found["gpu_us"] is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="", markersize=4, label=peer, **_style(number))
    axes.set_yticks(places, names, fontsize=6)
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_xlabel("us per call")
    axes.grid(alpha=0.3, axis="x", which="both")
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _page(pictures: Sequence[tuple[str, Path]], cases: Sequence[Case]) -> str:
    parts = ["<!doctype html><meta charset='utf-8'><title>dsagen bench</title>"]
    parts.append("<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:right}</style>")
    for title, path in pictures:
        name = html.escape(path.name)
        parts.append(f"<h3>{html.escape(title)}</h3><img src='{name}' alt='{html.escape(title)}' width='800'>")
    parts.append("<h3>Figures</h3><p>Lines are of shapes measured at two batches or more; the table has all.</p>")
    parts.append("<table><tr><th>spec<th>case<th>GPU us<th>floor us<th>issue us</tr>")
    for case in cases:
        shape = ", ".join(f"{name} {value}" for name, value in case["case"].items() if value is not None)
        cells = (case["spec"], shape, case["gpu_us"], case.get("floor_us"), case.get("issue_us"))
        parts.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in cells) + "</tr>")
    return "\n".join([*parts, "</table>"])
