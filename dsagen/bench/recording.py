"""Figures as evidence rows, one for each kernel of a measured spec, and the last recorded times to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dsagen.bench.figures import CaseKey, DecodeFigures, case_key
from dsagen.build import Store
from dsagen.check.recording import driver_version
from dsagen.errors import StoreError
from dsagen.evidence import EvidenceRow, load_evidence, read_rows, record, row_for
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.slug import parse_slug
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


def record_figures(
    spec: DeploymentSpec, figures: Sequence[DecodeFigures], file: Path | None = None, store: Store | None = None
) -> tuple[Path, ...]:
    """Append one row for each kernel that ran in a spec's cases to the store's evidence, or to `file`.

    A kernel's row holds the cases that it took part in. Returns the files that were written; raises StoreError when the
    place cannot be written, or when a kernel that ran is not in the store any more.
    """
    store = store or Store.open()
    driver = driver_version()
    rows = []
    for plan in expand(spec, (parse_slug(figures[0].slug).arch,)).plans():
        cases = [found for found in figures if _took_part(plan, found)]
        if not cases:
            continue
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


def slower_lines(figures: Sequence[DecodeFigures]) -> list[str]:
    """A line for each case that takes notably longer than its last record."""
    return [
        f"slower than the last record: {found.spec} batch {found.case.batch}: {found.gpu_us:.1f} us, was "
        f"{found.record_us:.1f} us"
        for found in figures
        if found.slower
    ]


def _took_part(plan: KernelPlan, found: DecodeFigures) -> bool:
    return plan.slug == found.slug or (plan.variant.kernel == "combine" and found.num_splits > 1)
