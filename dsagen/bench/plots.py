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
_DPI = 120
# Axes of a case that are not the batch tell its lines apart.
_HIDDEN = ("batch", "kv_tokens", "page_size", "kv_format", "heads")


def write_plots(cases: Sequence[Case], folder: Path) -> list[Path]:
    """Draw figures into `folder`, PNG files and index.html; returns the files, the page first.

    SpecError where there is nothing to draw, or matplotlib is not installed; StoreError where a file cannot be written.
    """
    if not cases:
        raise SpecError("nothing to draw: no benchmark of these specs is recorded; run `dsagen bench` on a device")
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

    def draw(name: str, title: str, plot: Callable[[Any], None]) -> None:
        figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
        plot(axes)
        axes.set_title(title)
        path = folder / f"{name}.png"
        figure.savefig(path)
        pyplot.close(figure)
        pictures.append((title, path))

    for spec, own in _by(decode, "spec").items():
        draw(f"{spec}.us", f"{spec} on {own[0]['device']}: GPU time of sparse decode", _times(own))
    if decode:
        device = decode[0]["device"]
        draw("sparse_decode.floor", f"Sparse decode on {device}: GPU time over the floor", _floors(decode))
        draw("sparse_decode.roofline", f"Sparse decode on {device}: roofline", _roofline(decode))
    for spec, own in _by(selections, "spec").items():
        draw(f"{spec}.topk", f"{spec} on {own[0]['device']}: GPU time of top-k", _selections(own))
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


def _lines(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Cases by what they share but for the batch, in the order of batches; the label is what differs among lines."""
    keys = sorted({name for case in cases for name in case["case"] if name not in _HIDDEN})
    varying = [name for name in keys if len({str(case["case"].get(name)) for case in cases}) > 1]
    lines: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: int(case["case"]["batch"])):
        lines.setdefault(" ".join(f"{name} {case['case'].get(name)}" for name in varying), []).append(case)
    return lines


def _batches(cases: Sequence[Case]) -> list[int]:
    return [int(case["case"]["batch"]) for case in cases]


def _over_batches(axes: Any, cases: Sequence[Case], label: str) -> None:
    batches = sorted(set(_batches(cases)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def _times(cases: Sequence[Case]) -> Callable[[Any], None]:
    def plot(axes: Any) -> None:
        _over_batches(axes, cases, "us per call")
        axes.set_yscale("log")
        for label, line in _lines(cases).items():
            axes.plot(_batches(line), [case["gpu_us"] for case in line], "o-", lw=2, label=f"dsagen {label}".strip())
            floors = [case["floor_us"] for case in line]
            if all(floor is not None for floor in floors):
                axes.plot(_batches(line), floors, ":", color="grey", label=f"floor {label}".strip())
            for peer in dict.fromkeys(peer["label"] for case in line for peer in case["peers"]):
                points = [
                    (int(case["case"]["batch"]), found["gpu_us"])
                    for case in line
                    for found in case["peers"]
                    if found["label"] == peer and found["gpu_us"] is not None
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), "x--", label=f"{peer} {label}".strip())
        axes.legend(fontsize=8)

    return plot


def _floors(cases: Sequence[Case]) -> Callable[[Any], None]:
    def plot(axes: Any) -> None:
        known = [case for case in cases if case["floor_us"]]
        _over_batches(axes, cases, "x floor")
        axes.set_yscale("log")
        axes.axhline(1.0, color="grey", lw=1)
        for spec, own in _by(known, "spec").items():
            for label, line in _lines(own).items():
                ratios = [case["gpu_us"] / case["floor_us"] for case in line]
                axes.plot(_batches(line), ratios, "o-", label=f"{spec} {label}".strip())
        axes.legend(fontsize=8)

    return plot


def _roofline(cases: Sequence[Case]) -> Callable[[Any], None]:
    def plot(axes: Any) -> None:
        for spec, own in _by(cases, "spec").items():
            bytes_per_us = [case["tb_per_s"] * 1e6 for case in own]
            flops_per_us = [case["tflops_per_s"] * 1e6 for case in own]
            intensity = [flops / max(moved, 1.0) for flops, moved in zip(flops_per_us, bytes_per_us, strict=True)]
            axes.plot(intensity, [case["tflops_per_s"] for case in own], "o", alpha=0.7, label=spec)
        ceilings = ceilings_of(str(cases[0]["device"]))
        if ceilings is not None:
            low, high = axes.get_xlim()
            peak, rate = ceilings.bf16_flops_per_second / 1e12, ceilings.dram_read_bytes_per_second / 1e12
            xs = sorted({low / 1.5, peak / rate, max(high * 1.5, peak / rate * 2)})
            axes.plot(xs, [min(peak, x * rate) for x in xs], "-", color="grey", label="measured ceilings")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("FLOP per byte of selected cache rows")
        axes.set_ylabel("TFLOP/s")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)

    return plot


def _selections(cases: Sequence[Case]) -> Callable[[Any], None]:
    def plot(axes: Any) -> None:
        rows = list(reversed(cases))
        names = ["{rows} x {width} {score}, k {k}, {mode}".format(**case["case"]) for case in rows]
        places = list(range(len(rows)))
        axes.barh(places, [case["gpu_us"] for case in rows], height=0.6, color="tab:blue", alpha=0.7, label="dsagen")
        for peer in dict.fromkeys(peer["label"] for case in rows for peer in case["peers"]):
            points = [
                (found["gpu_us"], place)
                for place, case in zip(places, rows, strict=True)
                for found in case["peers"]
                if found["label"] == peer and found["gpu_us"] is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), "|", markersize=9, markeredgewidth=2, label=peer)
        axes.set_yticks(places, names, fontsize=6)
        axes.set_xscale("log")
        axes.set_xlabel("us per call")
        axes.grid(alpha=0.3, axis="x", which="both")
        axes.legend(fontsize=7)

    return plot


def _page(pictures: Sequence[tuple[str, Path]], cases: Sequence[Case]) -> str:
    parts = ["<!doctype html><meta charset='utf-8'><title>dsagen bench</title>"]
    parts.append("<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:right}</style>")
    for title, path in pictures:
        name = html.escape(path.name)
        parts.append(f"<h3>{html.escape(title)}</h3><img src='{name}' alt='{html.escape(title)}' width='800'>")
    parts.append("<h3>Figures</h3><table><tr><th>spec<th>case<th>GPU us<th>floor us<th>issue us</tr>")
    for case in cases:
        shape = ", ".join(f"{name} {value}" for name, value in case["case"].items() if value is not None)
        cells = (case["spec"], shape, case["gpu_us"], case.get("floor_us"), case.get("issue_us"))
        parts.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in cells) + "</tr>")
    return "\n".join([*parts, "</table>"])
