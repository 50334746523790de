"""The command line: parse, call, print. `dsagen.cli:main` is the entry point."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (of the process by default); the exit code."""
    try:
        # Imported here, so that an interrupt while modules load is one like any other.
        from dsagen.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
