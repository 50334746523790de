"""A report as evidence rows, one for each kernel of the checked spec that its cases launched on the device."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from dsagen.build import Store
from dsagen.check.report import CheckReport
from dsagen.check.step_cases import StepCase
from dsagen.dependent import is_dependent
from dsagen.emulator.library import load_library
from dsagen.ending import run_child
from dsagen.errors import StoreError
from dsagen.evidence import record, row_for
from dsagen.families.indexer_logits.forms import COUNTED
from dsagen.matrix import expand
from dsagen.plan import KernelPlan
from dsagen.render import render
from dsagen.spec import DeploymentSpec

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_UNKNOWN = "unknown"


def record_report(
    spec: DeploymentSpec, arch: str, report: CheckReport, file: Path | None = None, store: Store | None = None
) -> tuple[Path, ...]:
    """Append the report's rows to the store's evidence, or to `file`; the files that were written.

    Raises StoreError when the place cannot be written, or when a kernel that ran is not in the store any more.
    """
    assert report.device is not None, "only device runs are evidence"
    store = store or Store.open()
    # Of the emulator it is the build of its machine that may matter.
    driver = load_library().name if report.emulated else driver_version()
    rows = []
    for plan in expand(spec, (arch,)).plans():
        unit, own = render(plan), report.of_kernel(launching_op(plan), plan.slug)
        if not own.results:
            continue
        entry = store.lookup(unit)
        if entry is None:
            raise StoreError(f"{unit.slug}: not in the store, so what compiled it cannot be recorded")
        rows.append(
            row_for(
                unit,
                "conformance",
                device=report.device,
                spec=report.spec,
                toolchain=f"nvcc {entry.nvcc_version}",
                driver=driver,
                tier=report.tier,
                seed=report.seed,
                passed=own.count("passed"),
                failed=own.count("failed"),
                not_run=own.count("not_run"),
                worst=own.worst(),
            )
        )
    return record(rows, file, store)


def launching_op(plan: KernelPlan) -> str:
    """The op whose cases launch a kernel: of forms that wait for the one before them or count for the next, steps."""
    only_steps = is_dependent(plan.variant) or plan.variant.kernel == COUNTED
    return StepCase.op if only_steps else plan.variant.family


def driver_version() -> str:
    """The kernel driver's version such as "580.159.04", "unknown" where the machine does not tell."""
    try:
        found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", _DRIVER_FILE.read_text())
        if found:
            return found[0]
    except OSError:
        pass
    try:
        command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        done = run_child(command, timeout=20)
        return done.stdout.split()[0] if done.returncode == 0 else _UNKNOWN
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return _UNKNOWN
