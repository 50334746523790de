"""Refusing ahead of a long run what could not be written after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dsagen.errors import StoreError


def require_appendable(file: Path, what: str) -> None:
    """StoreError, with `what` as the file's name in words, where it can be neither made nor appended to."""
    try:
        existed = file.exists()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
        if not existed:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{file!s:.200}: {what} cannot be written ({error.strerror}): name another file") from None


def require_folder(folder: Path, what: str) -> None:
    """StoreError, with `what` as what goes there, where the folder cannot be made or takes no file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreError(f"{folder!s:.200}: {what} cannot be written ({error.strerror}): name another place") from None
