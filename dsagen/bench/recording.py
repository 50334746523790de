"""Figures as evidence rows, one for each kernel of a measured spec, and the last recorded times to compare with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from dsagen.bench.figures import CaseKey, Figures, case_key
from dsagen.build import Store
from dsagen.check.recording import driver_version
from dsagen.errors import StoreError
from dsagen.evidence import EvidenceRow, load_evidence, read_rows, record, row_for
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.render import RenderedUnit, render
from dsagen.spec import DeploymentSpec


def last_times_us(device: str, file: Path | None = None, store: Store | None = None) -> dict[CaseKey, float]:
    """GPU time by case of the last benchmark on a device, from shipped evidence, the store's, and `file` if it exists.

    Whatever kernel ran then counts: a case is the user's, a kernel is ours to exchange.
    """
    rows: Iterable[EvidenceRow] = load_evidence(store or Store.open())
    if file is not None and file.is_file():
        rows = (*rows, *read_rows(file))
    times: dict[CaseKey, float] = {}
    for row in sorted(rows, key=lambda row: row.date):
        if row.kind == "benchmark" and row.device == device:
            times.update({case_key(case["case"]): case["gpu_us"] for case in row.figures.get("cases", ())})
    return times


def last_cases(
    specs: Sequence[DeploymentSpec], file: Path | None = None, store: Store | None = None
) -> list[Mapping[str, Any]]:
    """The last figures of each case of these specs, recorded of kernels that they have now, on one device.

    A measurement stands in a row of each kernel that ran. It counts where all of these are kernels of the spec: figures
    of other bodies and other texts do not belong beside them. The device is the one that was measured last.
    """
    rows: Iterable[EvidenceRow] = load_evidence(store or Store.open())
    if file is not None and file.is_file():
        rows = (*rows, *read_rows(file))
    ordered = sorted((row for row in rows if row.kind == "benchmark"), key=lambda row: row.date)
    units = {spec.name: _units(spec, {row.arch for row in ordered}) for spec in specs}
    measured: dict[str, tuple[str, Mapping[str, Any]]] = {}
    stale: set[str] = set()
    for row in ordered:
        own = [case for case in row.figures.get("cases", ()) if case["spec"] in units]
        matching = {name for name in {case["spec"] for case in own} if any(map(row.matches, units[name]))}
        for case in own:
            measurement = json.dumps([row.device, case], sort_keys=True)
            measured[measurement] = (row.device, case)
            if case["spec"] not in matching:
                stale.add(measurement)
    kept = [found for measurement, found in measured.items() if measurement not in stale]
    last = {(case["spec"], case_key(case["case"])): case for device, case in kept if device == kept[-1][0]}
    return list(last.values())


def _units(spec: DeploymentSpec, archs: Set[str]) -> list[RenderedUnit]:
    """The spec's kernels for those of its archs that are among `archs`."""
    wanted = [arch for arch in spec.archs if arch in archs]
    return [render(plan) for plan in expand(spec, wanted).plans()] if wanted else []


def record_figures(
    spec: DeploymentSpec, figures: Sequence[Figures], file: Path | None = None, store: Store | None = None
) -> tuple[Path, ...]:
    """Append one row for each kernel that ran in a spec's cases to the store's evidence, or to `file`.

    A kernel's row holds the cases that it took part in. Returns the files that were written; raises StoreError when the
    place cannot be written, or when a kernel that ran is not in the store any more.
    """
    store = store or Store.open()
    driver = driver_version()
    rows = []
    for plan in _plans_that_ran(spec, figures):
        cases = [found for found in figures if found.took_part(plan)]
        unit = render(plan)
        entry = store.lookup(unit)
        if entry is None:
            raise StoreError(f"{unit.slug}: not in the store, so what compiled it cannot be recorded")
        rows.append(
            row_for(
                unit,
                "benchmark",
                device=cases[0].device,
                spec=spec.name,
                toolchain=f"nvcc {entry.nvcc_version}",
                driver=driver,
                figures={"cases": [found.to_json() for found in cases]},
            )
        )
    return record(rows, file, store)


def slower_lines(figures: Sequence[Figures]) -> list[str]:
    """A line for each case that takes notably longer than its last record."""
    return [
        f"slower than the last record: {found.spec} {found.title}: {found.gpu_us:.1f} us, was {found.record_us:.1f} us"
        for found in figures
        if found.slower
    ]


def _plans_that_ran(spec: DeploymentSpec, figures: Sequence[Figures]) -> list[KernelPlan]:
    """Each kernel once, in the order of the matrices of what was measured."""
    plans: dict[str, KernelPlan] = {}
    for found in figures:
        for plan in expand(found.measured_spec(spec), (found.arch,)).plans():
            if found.took_part(plan):
                plans.setdefault(plan.slug, plan)
    return list(plans.values())
