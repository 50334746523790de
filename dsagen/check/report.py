"""What a check found, as data, as a table and as a verdict. What did not run is counted apart and never as passed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from dsagen.emulator import DEVICE as EMULATOR
from dsagen.errors import CheckFailed
from dsagen.quantity import quantity

Status = Literal["passed", "failed", "not_run"]
_STYLES: dict[Status, str] = {"passed": "green", "failed": "bold red", "not_run": "yellow"}


@dataclass(frozen=True)
class CaseResult:
    """One case. `problem` says what is wrong or why it did not run; errors are 0 where nothing was compared.

    `slugs` name the kernels that it launched, None where every case launches all of the op's.
    """

    name: str
    status: Status
    seconds: float = 0.0
    out_abs: float = 0.0
    out_rel: float = 0.0
    out_cos: float = 0.0
    group_error: float = 0.0
    lse_abs: float = 0.0
    lse_rel: float = 0.0
    problem: str = ""
    op: str = "sparse_decode"
    slugs: tuple[str, ...] | None = None

    def concerns(self, slug: str) -> bool:
        """Whether it says something of a kernel of its op. What failed or did not run before a launch, of all."""
        return self.slugs is None or slug in self.slugs or (not self.slugs and self.status != "passed")


@dataclass(frozen=True)
class CheckReport:
    """Results for one spec. `device` is None where no device case could run, and `no_device` says why then.

    `seed` replays every draw; `arch` is that of the kernels. `host_results` are the proofs that need no device.
    """

    spec: str
    tier: str
    seed: int
    device: str | None
    no_device: str
    results: tuple[CaseResult, ...]
    host_results: tuple[CaseResult, ...]
    arch: str = ""

    def of_op(self, op: str) -> CheckReport:
        """The report with the device cases of one op."""
        return replace(self, results=tuple(result for result in self.results if result.op == op))

    def of_kernel(self, op: str, slug: str) -> CheckReport:
        """The report with the device cases that prove something of one kernel of an op; none if no case launched it."""
        own = [result for result in self.results if result.op == op and result.concerns(slug)]
        launched = any(result.slugs is None or slug in result.slugs for result in own)
        return replace(self, results=tuple(own) if launched else ())

    def count(self, status: Status) -> int:
        """Device cases with that status."""
        return sum(result.status == status for result in self.results)

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """Cases, of host and device, that failed."""
        return tuple(result for result in self.host_results + self.results if result.status == "failed")

    @property
    def passed(self) -> bool:
        """Whether nothing failed; says nothing of what did not run."""
        return not self.failures

    @property
    def conformant(self) -> bool:
        """Whether device cases ran and none failed."""
        return self.passed and self.count("passed") > 0

    def worst(self) -> dict[str, float]:
        """The largest of each error over the device cases that passed."""
        names = ("out_abs", "out_rel", "out_cos", "group_error", "lse_abs", "lse_rel")
        passed = [result for result in self.results if result.status == "passed"]
        return {name: max((getattr(result, name) for result in passed), default=0.0) for name in names}

    @property
    def emulated(self) -> bool:
        """Whether the emulator was the device."""
        return self.device == EMULATOR

    @property
    def place(self) -> str:
        """The device as text; the emulator with the arch that it stood for."""
        return f"{self.device} as {self.arch}" if self.emulated else self.device or "no device"

    def summary(self) -> str:
        """One line."""
        counts = f"{self.count('passed')} of {len(self.results)} device cases passed"
        parts = [counts, f"{self.count('failed')} failed", f"{self.count('not_run')} did not run"]
        host = f"{sum(r.status == 'passed' for r in self.host_results)} of {len(self.host_results)} host proofs passed"
        where = self.place if self.device else f"no device: {self.no_device}"
        return f"{self.spec} ({self.tier}, seed {self.seed}, {where}): {', '.join(parts)}; {host}"

    def require_passed(self) -> None:
        """CheckFailed that lists every failure, if there is one."""
        if self.passed:
            return
        listed = "\n  ".join(f"{result.name}: {result.problem}" for result in self.failures)
        where = f" --device {EMULATOR} --arch {self.arch}" if self.emulated else ""
        raise CheckFailed(
            f"{self.summary()}\n  {listed}\n"
            f"Replay: dsagen check {self.spec} --tier {self.tier} --seed {self.seed}{where}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        counts = {status: self.count(status) for status in _STYLES}
        return {**asdict(self), "counts": counts, "passed": self.passed, "worst": self.worst()}

    def print(self, console: Console, verbose: bool = False) -> None:
        """The table (all cases, or with `verbose` False only a line per kind of passed cases) and the summary."""
        table = Table(title=f"{self.spec}: {self.tier} tier on {self.place}", title_justify="left")
        for column in ("case", "result", "out abs", "out rel", "out cos", "group", "lse abs", "lse rel"):
            table.add_column(column, justify="left" if column in ("case", "result") else "right", overflow="fold")
        for row in self.host_results + (self.results if verbose else _condensed(self.results)):
            errors = (row.out_abs, row.out_rel, row.out_cos, row.group_error, row.lse_abs, row.lse_rel)
            figures = [f"{error:.1e}" if error else "" for error in errors]
            table.add_row(row.name, f"[{_STYLES[row.status]}]{row.status.replace('_', ' ')}", *figures)
        console.print(table)
        for result in self.failures:
            console.print(f"[bold red]{result.name}[/]: {result.problem}", highlight=False)
        self._print_not_run(console)
        console.print(self.summary(), highlight=False, soft_wrap=True)

    def _print_not_run(self, console: Console) -> None:
        reasons: dict[str, int] = {}
        for result in self.results:
            if result.status == "not_run":
                reasons[result.problem] = reasons.get(result.problem, 0) + 1
        for reason, count in reasons.items():
            console.print(
                f"[yellow]{quantity(count, 'device case')} did not run[/]: {reason}", highlight=False, soft_wrap=True
            )


def _condensed(results: tuple[CaseResult, ...]) -> tuple[CaseResult, ...]:
    """Failures as they are; passed and missing cases by the first word of their name, with their worst errors."""
    kinds: dict[tuple[str, Status], list[CaseResult]] = {}
    for result in results:
        key = result.name if result.status == "failed" else result.name.split(".")[0]
        kinds.setdefault((key, result.status), []).append(result)
    rows = []
    for (kind, status), members in kinds.items():
        worst = {
            name: max(getattr(member, name) for member in members)
            for name in ("seconds", "out_abs", "out_rel", "out_cos", "group_error", "lse_abs", "lse_rel")
        }
        rows.append(CaseResult(kind if status == "failed" else f"{kind} ({len(members)} cases)", status, **worst))
    return tuple(rows)
