"""Showing a build: what compiles now on a terminal, one line per kernel elsewhere, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from dsagen.build.watch import RunningCompile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

MIB = 1 << 20
# Rows of running compiles; more do not fit below a build's lines.
_MOST_ROWS = 8


class BuildProgress(Protocol):
    """What a build tells while it runs; `begin` and `end` frame each batch of compiles."""

    def begin(self, kernels: int, jobs: int) -> None:
        """A batch of `kernels` compiles starts, `jobs` at once."""

    def look(self, running: Sequence[RunningCompile]) -> None:
        """These compiles are under way; told several times a second."""

    def finish(self, name: str, seconds: float, failure: str | None, memory_bytes: int) -> None:
        """One kernel is done; `failure` says why it failed, None that it is in the store; memory 0 is unknown."""

    def wait(self, name: str) -> None:
        """Another process builds `name`; its result is waited for."""

    def end(self) -> None:
        """The batch is over."""


class QuietProgress:
    """Shows nothing."""

    def begin(self, kernels: int, jobs: int) -> None: ...  # noqa: D102

    def look(self, running: Sequence[RunningCompile]) -> None: ...  # noqa: D102

    def finish(self, name: str, seconds: float, failure: str | None, memory_bytes: int) -> None: ...  # noqa: D102

    def wait(self, name: str) -> None: ...  # noqa: D102

    def end(self) -> None: ...  # noqa: D102


class LineProgress:
    """A plain line per kernel, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._kernels = 0
        self._done = 0

    def begin(self, kernels: int, jobs: int) -> None:  # noqa: D102
        self._kernels, self._done = kernels, 0
        self._print(f"compiling {kernels} kernel{'s' if kernels != 1 else ''}, {jobs} at once")

    def look(self, running: Sequence[RunningCompile]) -> None: ...  # noqa: D102

    def finish(self, name: str, seconds: float, failure: str | None, memory_bytes: int) -> None:  # noqa: D102
        self._done += 1
        figures = figures_text(seconds, memory_bytes)
        self._print(f"[{self._done}/{self._kernels}] {'FAILED ' if failure else ''}{name} {figures}")

    def wait(self, name: str) -> None:  # noqa: D102
        self._print(f"waiting for another process that builds {name}")

    def end(self) -> None: ...  # noqa: D102

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class LiveProgress:
    """For a terminal: a line per finished kernel; below them what runs, with time and memory, and a bar for all."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._live: Live | None = None

    def begin(self, kernels: int, jobs: int) -> None:  # noqa: D102
        # rich takes as long to import as a warm build takes in all, so only a build that compiles pays for it.
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = self._console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=console)
        self._task = self._bar.add_task(f"compiling, {jobs} at once", total=kernels, left="")
        self._kernels, self._jobs = kernels, jobs
        self._seconds: list[float] = []
        self._live = Live(self._view(()), console=console, transient=True, refresh_per_second=8)
        self._live.start()

    def look(self, running: Sequence[RunningCompile]) -> None:  # noqa: D102
        if self._live is not None:
            self._live.update(self._view(running))

    def finish(self, name: str, seconds: float, failure: str | None, memory_bytes: int) -> None:  # noqa: D102
        if self._live is None:
            return
        mark = "[red]failed[/red]" if failure else "[green]built[/green] "
        figures = figures_text(seconds, memory_bytes)
        self._live.console.print(f"{mark} {name} {figures}", highlight=False, soft_wrap=True)
        self._seconds.append(seconds)
        self._bar.update(self._task, advance=1, left=self._left_text())

    def wait(self, name: str) -> None:  # noqa: D102
        print(f"waiting for another process that builds {name}", file=sys.stderr, flush=True)

    def end(self) -> None:  # noqa: D102
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _view(self, running: Sequence[RunningCompile]) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        longest_first = sorted(running, key=lambda compile: -compile.seconds)
        for compile in longest_first[:_MOST_ROWS]:
            row = (f"  {compile.name}", f"{compile.seconds:.1f} s", f"{compile.memory_bytes // MIB} MiB")
            table.add_row(*row, style="dim")
        if len(running) > _MOST_ROWS:
            table.add_row(f"  and {len(running) - _MOST_ROWS} more", "", "", style="dim")
        return Group(table, self._bar)

    def _left_text(self) -> str:
        """How long the rest takes if it is like what is done."""
        left = self._kernels - len(self._seconds)
        mean = sum(self._seconds) / len(self._seconds)
        return f"about {left * mean / self._jobs:.0f} s left" if left else ""


def figures_text(seconds: float, memory_bytes: int) -> str:
    """What a compile took, such as "0.52 s, 93 MiB"; without the memory where it is not known."""
    return f"{seconds:.2f} s" + (f", {memory_bytes / MIB:.0f} MiB" if memory_bytes else "")


def make_progress(quiet: bool = False) -> BuildProgress:
    """The progress that suits standard error: live on a terminal, lines elsewhere, nothing when `quiet`."""
    if quiet or sys.stderr is None:  # None where the process was started with it closed
        return QuietProgress()
    return LiveProgress() if sys.stderr.isatty() else LineProgress(sys.stderr)
