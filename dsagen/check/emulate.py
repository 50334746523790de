"""A spec's quick cases on the emulator, over several orders of its warps, with what each kernel did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from dsagen.check.report import CheckReport
from dsagen.check.run import Source, run_check
from dsagen.emulator import DEVICE
from dsagen.emulator.counters import Counters, total
from dsagen.runtime.emulated import EmulatedLaunch, EmulatorOptions


@dataclass(frozen=True)
class EmulatedKernel:
    """What a kernel did over the cases of one run: its launches, and the sums of their counters."""

    symbol: str
    launches: int
    counters: Counters


@dataclass(frozen=True)
class SeedRun:
    """The report of one emulator seed; `kernels` are measured for the first seed only."""

    seed: int
    report: CheckReport
    kernels: tuple[EmulatedKernel, ...]

    @property
    def replay(self) -> str:
        """Commands that run the first failure again, empty where nothing failed."""
        report = self.report
        if report.passed:
            return ""
        case = report.failures[0].name
        return (
            f"DSAGEN_EMULATOR_SEED={self.seed} dsagen check {report.spec} --device {DEVICE} --arch {report.arch} "
            f"--tier {report.tier} --seed {report.seed} --only '{case}'"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        kernels = [asdict(kernel) for kernel in self.kernels]
        return {"emulator_seed": self.seed, "report": self.report.to_json(), "kernels": kernels, "replay": self.replay}


def run_seed(
    source: Source,
    arch: str,
    emulator_seed: int,
    seed: int,
    *,
    only: str | None = None,
    measure: bool = True,
    console: Console | None = None,
) -> SeedRun:
    """The quick cases of a spec as one arch, drawn from `seed`, with warps in the order that `emulator_seed` gives.

    `measure` counts what each kernel does. Nothing is recorded. Raises as run_check does; failures are in the report.
    """
    launches: list[EmulatedLaunch] = []
    options = EmulatorOptions(seed=emulator_seed, counters=measure, observe=launches.append if measure else None)
    report = run_check(
        source, seed=seed, device=DEVICE, arch=arch, only=only, console=console, record=False, emulator=options
    )
    return SeedRun(emulator_seed, report, tuple(_kernels(launches)))


def _kernels(launches: list[EmulatedLaunch]) -> list[EmulatedKernel]:
    by_symbol: dict[str, list[Counters]] = {}
    for launch in launches:
        assert launch.counts.measured is not None
        by_symbol.setdefault(launch.symbol, []).append(launch.counts.measured)
    return [EmulatedKernel(symbol, len(found), total(found)) for symbol, found in by_symbol.items()]
