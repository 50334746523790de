"""SIGTERM and SIGHUP as interrupts, so that what is half done is ended and cleaned up first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

# What ends a process politely.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


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
