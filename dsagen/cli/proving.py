"""`dsagen check` and `dsagen bench`: what needs a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsagen.cli.paths import NamedPath
from dsagen.cli.selection import arch_option, json_option, quiet_option, select, specs_argument
from dsagen.cli.table import echo_json
from dsagen.errors import CheckFailed, DeviceError, DsagenError, SpecError
from dsagen.quantity import quantity

if TYPE_CHECKING:
    from dsagen.check.cases import Tier
    from dsagen.check.report import CheckReport

# What a generator of torch takes.
MAX_SEED = 2**63 - 1

_DEVICE = click.option(
    "--device",
    metavar="DEVICE",
    help="A CUDA device such as cuda:1, or `emulator`: the same cases on the CPU.  [default: the current CUDA device]",
)
_RECORD = click.option(
    "--record",
    type=NamedPath(path_type=Path, dir_okay=False),
    help="Evidence file to append to.  [default: one in the kernel store]",
)

# Columns of a table that is not printed on a terminal, whose width rich would take for 80.
_PLAIN_WIDTH = 140


@click.command()
@specs_argument()
@click.option("--tier", type=click.Choice(["quick", "full"]), default="quick", show_default=True, help="Case list.")
@click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), help="Replay the run that printed it.  [default: a fresh one]"
)
@click.option("--only", metavar="PATTERN", help="Cases whose name matches a shell pattern; such a run is no evidence.")
@_DEVICE
@arch_option
@_RECORD
@quiet_option
@json_option
@click.pass_context
def check(
    context: click.Context,
    specs: tuple[str, ...],
    tier: str,
    seed: int | None,
    only: str | None,
    device: str | None,
    archs: tuple[str, ...],
    record: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare every kernel of the SPECs with the fp64 reference on this machine's device.

    Without a device it proves what can be proven without one, says how many cases did not run, and exits with 5.
    With --device emulator it runs the kernels' PTX on the CPU, as each arch of the SPECs or as those of --arch.
    """
    from rich.console import Console

    from dsagen.check.run import run_check

    if device is not None and device.isdecimal():
        device = f"cuda:{device}"
    runs = _runs(specs, device, archs)
    require_cases(runs, "full" if tier == "full" else "quick", only)
    verbose = context.parent is not None and context.parent.params.get("verbose", 0) > 0
    progress = None if as_json or quiet else Console(stderr=True)
    console = Console() if sys.stdout is not None and sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    reports = []
    for spec, arch in runs:
        report = run_check(
            spec,
            "full" if tier == "full" else "quick",
            seed=seed,
            device=device,
            arch=arch,
            only=only,
            console=progress,
            record_file=record,
        )
        reports.append(report)
        if not (as_json or quiet):
            report.print(console, verbose)
    if as_json:
        echo_json({"reports": [report.to_json() for report in reports]})
    _require_proof(reports)


def _runs(specs: Sequence[str], device: str | None, archs: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """Each spec; on the emulator with each arch that it is to stand for."""
    from dsagen.emulator import DEVICE

    if device == DEVICE:
        return [
            (spec, arch)
            for spec in specs
            for arch in dict.fromkeys(cell.arch for cell in select([spec], archs)[0].matrix.cells)
        ]
    if archs:
        raise SpecError(f"--arch {','.join(archs)}: a device has the arch that it has: add --device {DEVICE}")
    return [(spec, None) for spec in specs]


def require_cases(runs: Sequence[tuple[str, str | None]], tier: Tier, only: str | None) -> None:
    """SpecError for a spec that cannot be loaded and for one without a chosen case, before the first of them runs."""
    from dsagen.check.run import cases_of
    from dsagen.spec import load_spec

    for source, arch in runs:
        spec = load_spec(source)
        cases_of(spec, arch or spec.archs[0], tier, only)


def _require_proof(reports: Sequence[CheckReport]) -> None:
    """CheckFailed for wrong numbers, DeviceError where nothing ran on a device."""
    problems = []
    for report in reports:
        try:
            report.require_passed()
        except DsagenError as error:
            problems.append(str(error))
    if problems:
        raise CheckFailed("\n".join(problems))
    for report in reports:
        if report.device is None:
            left = quantity(report.count("not_run"), "device case")
            raise DeviceError(
                f"{report.spec}: {left} did not run: {report.no_device}; run "
                "`dsagen check` on a machine with a GPU that the spec declares, or with --device emulator on the CPU"
            )
        if not report.conformant:
            reasons = ", ".join(dict.fromkeys(result.problem for result in report.results))
            raise DeviceError(f"{report.spec}: none of {len(report.results)} cases ran on {report.place}: {reasons}")
