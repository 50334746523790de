"""`dsagen bench --shape-list`: a list of shapes beside the best peer of each, with verdicts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsagen.cli.selection import select
from dsagen.cli.table import aligned, echo_json, echo_lines
from dsagen.errors import CheckFailed, SpecError
from dsagen.quantity import quantity

if TYPE_CHECKING:
    from dsagen.bench.shapes import Shape
    from dsagen.bench.verdicts import ComparedShape
    from dsagen.spec import DeploymentSpec


def bench_shapes(
    names: Sequence[str],
    shape_list: str,
    *,
    peers: bool,
    time_limit: int | None,
    record: Path | None,
    progress: Callable[[str], None],
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure the shapes of a list with each of the specs of these names, and print verdicts and a summary.

    What was measured is recorded and printed however the run ends. Raises SpecError for specs and shapes that do not go
    together before anything is measured, CheckFailed at the end where outputs were wrong.
    """
    from dsagen.bench.recording import last_times_us
    from dsagen.bench.shape_run import sweep_shapes
    from dsagen.bench.shapes import load_shapes, specs_of
    from dsagen.bench.sweep import current_device_name
    from dsagen.evidence import require_recordable
    from dsagen.matrix import expand

    shapes = load_shapes(shape_list)
    specs = [_require_decode(selection.spec) for selection in select(names, ())]
    for spec in specs:
        for made in specs_of(spec, shapes):
            expand(made).require_complete()
    device = current_device_name()
    require_recordable(record)
    records = last_times_us(device, record)
    begin, wrong = time.monotonic(), list[str]()
    found: list[tuple[DeploymentSpec, list[ComparedShape]]] = [(spec, []) for spec in specs]
    deadline_s = math.inf if time_limit is None else begin + time_limit
    try:
        for spec, compared in found:
            for one in sweep_shapes(
                spec, shapes, with_peers=peers, records=records, wrong=wrong.append, deadline_s=deadline_s
            ):
                compared.append(one)
                progress(f"{len(compared)} of {len(shapes)}: {one.text}")
    finally:
        seconds = time.monotonic() - begin
        left = len(specs) * len(shapes) - len(wrong) - sum(len(compared) for _, compared in found)
        try:
            _record(found, shapes, record)
        finally:  # what cannot be recorded is shown all the same
            if as_json:
                echo_json(_document(found, device, seconds, left))
            else:
                _show(found, device, quiet)
                echo_lines([f"{left} shapes were not measured in {seconds:.0f} s"] if left else [])
    if wrong:
        raise CheckFailed("\n  ".join((f"{quantity(len(wrong), 'shape')} gave wrong outputs:", *wrong)))


def _record(
    found: Sequence[tuple[DeploymentSpec, Sequence[ComparedShape]]], shapes: Sequence[Shape], file: Path | None
) -> None:
    from dsagen.bench.recording import record_figures
    from dsagen.bench.shapes import specs_of

    for spec, compared in found:
        for made in specs_of(spec, shapes):
            record_figures(made, [one.figures for one in compared if one.figures.spec == made.name], file)


def _require_decode(spec: DeploymentSpec) -> DeploymentSpec:
    if "sparse_decode" not in spec.ops:
        raise SpecError(f"{spec.name}: shapes are those of sparse_decode, which its ops lack: leave it out")
    return spec


def _show(found: Sequence[tuple[DeploymentSpec, Sequence[ComparedShape]]], device: str, quiet: bool) -> None:
    from dsagen.bench.verdicts import HEADER, summary_lines

    for spec, compared in found:
        if not quiet:
            echo_lines([f"{spec.name} on {device}", *aligned([one.cells() for one in compared], HEADER, indent=2)])
        echo_lines(summary_lines(compared))


def _document(
    found: Sequence[tuple[DeploymentSpec, Sequence[ComparedShape]]], device: str, seconds: float, left: int
) -> dict[str, object]:
    from dsagen.bench.verdicts import counts

    every = [one for _, compared in found for one in compared]
    return {
        "device": device,
        "seconds": round(seconds, 1),
        "not_measured": left,
        "verdicts": counts(every),
        "shapes": [one.to_json() for one in every],
    }
