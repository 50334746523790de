"""Trying once more where a network file system says that a file is busy or its handle stale: the next look finds it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRANSIENT = (errno.EBUSY, errno.ESTALE)
_WAITS_S = (0.0, 0.02, 0.1, 0.5)


def patiently(action: Callable[[], T]) -> T:
    """The action's result, tried again a few times while it fails with EBUSY or ESTALE; then its OSError."""
    for wait_s in _WAITS_S:
        try:
            return action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
        time.sleep(wait_s)
    return action()
