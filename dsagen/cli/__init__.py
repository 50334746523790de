"""The command line: parse, call, print. `dsagen.cli:main` is the entry point."""

from dsagen.cli.app import main

__all__ = ["main"]
