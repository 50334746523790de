"""The command line: parse, call, print. `dsagen.cli:main` is the entry point."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from dsagen.ending import ending_as_interrupt

__all__ = ["main"]

INTERRUPTED = 130
# As a shell tells of what SIGPIPE has ended.
READER_LEFT = 141
_SIGNAL_EXIT_BASE = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (of the process by default); the exit code."""
    with ending_as_interrupt() as received:
        try:
            # Imported here, so that an interrupt while modules load is one like any other.
            from dsagen.cli.app import run

            code = run(arguments)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):
                print("error: interrupted", file=sys.stderr)
            code = INTERRUPTED
        return _SIGNAL_EXIT_BASE + received[0] if received and code == INTERRUPTED else code
