"""SIGTERM and SIGHUP as interrupts, so that what is half done is ended and cleaned up first, child processes too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, AnyStr, TypeVar

# What ends a process politely.
_ENDING = (signal.SIGTERM, signal.SIGHUP)
# What may raise in the main thread between any two of its steps.
_INTERRUPTING = (signal.SIGINT, *_ENDING)

T = TypeVar("T")


@contextlib.contextmanager
def ending_as_interrupt() -> Iterator[list[int]]:
    """While inside, SIGTERM and SIGHUP interrupt, once; their numbers as they come. Only a main thread may do so.

    One that the process ignores, as under nohup, or handles itself stays as it is.
    """
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # another one must not stop the cleaning up
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    mine = [number for number in _ENDING if before[number] is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def cleaning_up_first() -> Iterator[None]:
    """What would end the process interrupts what is inside, and ends the process on the way out."""
    received: list[int] = []
    try:
        with ending_as_interrupt() as received:
            yield
    finally:
        if received:
            os.kill(os.getpid(), received[0])


def with_child(
    start: Callable[[], subprocess.Popen[AnyStr]],
    work: Callable[[subprocess.Popen[AnyStr]], T],
    stop: Callable[[subprocess.Popen[AnyStr]], None],
) -> T:
    """What `work` returns of the child process that `start` starts; `stop` follows on every way out.

    A signal whose handler would raise between the fork and the moment when `stop` is sure to follow is handled then,
    so that no child is left that nobody knows.
    """
    held = _HeldBack()
    try:
        held.hold()
        process = start()
        try:
            held.release()
            return work(process)
        finally:
            stop(process)
    finally:
        held.release()


def run_child(
    command: Sequence[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with what it prints as text; `options` are those of Popen.

    Raises OSError where it cannot be started, TimeoutExpired after `timeout` seconds. Killed on every early way out.
    """

    def start() -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, errors="replace", **pipes, **options)

    def work(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        output, errors = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def stop(process: subprocess.Popen[str]) -> None:
        with process:  # which closes its pipes and waits
            process.kill()

    return with_child(start, work, stop)


class _HeldBack:
    """Handlers in Python of interrupting signals, which have to wait.

    The thread's signal mask would not do: another thread may take a signal, whose handler then runs in the main one,
    and a child would inherit the mask.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []

    def hold(self) -> None:
        """From now on they wait. Elsewhere than in the main thread nothing interrupts."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _INTERRUPTING:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        """Put the handlers back, then call those whose signals came; where one raises, the rest is for a next time.

        A handler that is back may raise before the next one is: these are put back all the same.
        """
        try:
            self._put_back()
        finally:
            self._put_back()
        while self._came:
            number, handler = self._came.pop(0)
            handler(number, None)

    def _put_back(self) -> None:
        while self._handlers:
            number, handler = next(iter(self._handlers.items()))
            signal.signal(number, handler)
            del self._handlers[number]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._came.append((number, self._handlers[number]))
