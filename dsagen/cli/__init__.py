"""The command line: parse, call, print. `dsagen.cli:main` is the entry point."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

__all__ = ["main"]

INTERRUPTED = 130
# As a shell tells of what SIGPIPE has ended.
READER_LEFT = 141
# What ends a process politely; as interrupts they let a build end its compilers and clean up.
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_SIGNAL_EXIT_BASE = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (of the process by default); the exit code."""
    with _ending_as_interrupt() as received:
        try:
            # Imported here, so that an interrupt while modules load is one like any other.
            from dsagen.cli.app import run

            code = run(arguments)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):
                print("error: interrupted", file=sys.stderr)
            code = INTERRUPTED
        return _SIGNAL_EXIT_BASE + received[0] if received and code == INTERRUPTED else code


@contextlib.contextmanager
def _ending_as_interrupt() -> Iterator[list[int]]:
    """While inside, SIGTERM and SIGHUP interrupt, once; their numbers as they come. Only a main thread may do so."""
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # another one must not stop the cleaning up
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # One that is ignored, as under nohup, stays so.
    before = {number: signal.getsignal(number) for number in _ENDING}
    mine = [number for number in _ENDING if before[number] is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
