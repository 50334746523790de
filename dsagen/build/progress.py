"""Showing a build: a bar on a terminal, one line per kernel elsewhere, or nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


class BuildProgress(Protocol):
    """What a build tells while it runs; `begin` and `end` frame each batch of compiles."""

    def begin(self, kernels: int, jobs: int) -> None:
        """A batch of `kernels` compiles starts, `jobs` at once."""

    def finish(self, name: str, seconds: float, failure: str | None) -> None:
        """One kernel is done; `failure` says why it failed, None that it is in the store."""

    def wait(self, name: str) -> None:
        """Another process builds `name`; its result is waited for."""

    def end(self) -> None:
        """The batch is over."""


class QuietProgress:
    """Shows nothing."""

    def begin(self, kernels: int, jobs: int) -> None: ...  # noqa: D102

    def finish(self, name: str, seconds: float, failure: str | None) -> None: ...  # noqa: D102

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

    def finish(self, name: str, seconds: float, failure: str | None) -> None:  # noqa: D102
        self._done += 1
        self._print(f"[{self._done}/{self._kernels}] {'FAILED ' if failure else ''}{name} {seconds:.2f} s")

    def wait(self, name: str) -> None:  # noqa: D102
        self._print(f"waiting for another process that builds {name}")

    def end(self) -> None: ...  # noqa: D102

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class BarProgress:
    """A bar with count and elapsed time, and above it a line per finished kernel."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def begin(self, kernels: int, jobs: int) -> None:  # noqa: D102
        # rich takes as long to import as a warm build takes in all, so only a build that compiles pays for it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(f"compiling, {jobs} at once", total=kernels)
        self._progress.start()

    def finish(self, name: str, seconds: float, failure: str | None) -> None:  # noqa: D102
        if self._progress is not None:
            mark = "[red]failed[/red]" if failure else "[green]built[/green] "
            self._progress.console.print(f"{mark} {name} {seconds:.2f} s", highlight=False, soft_wrap=True)
            self._progress.advance(self._task)

    def wait(self, name: str) -> None:  # noqa: D102
        print(f"waiting for another process that builds {name}", file=sys.stderr, flush=True)

    def end(self) -> None:  # noqa: D102
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def make_progress(quiet: bool = False) -> BuildProgress:
    """The progress that suits standard error: a bar on a terminal, lines elsewhere, nothing when `quiet`."""
    if quiet or sys.stderr is None:  # None where the process was started with it closed
        return QuietProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress(sys.stderr)
