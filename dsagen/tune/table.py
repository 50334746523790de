"""Writing choice tables."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsagen.build import Store
from dsagen.errors import StoreError
from dsagen.evidence import device_kind
from dsagen.families.sparse_decode.choice_table import FOLDER, ChoiceRow, read_table
from dsagen.output_paths import require_folder
from dsagen.slug import parse_slug

# What to do about a table that rows cannot be merged into.
_ADVICE = "correct it, remove it, or name another with --output"


def default_file(device: str) -> Path:
    """The store's table for a device, which `dsagen.load` reads; StoreError without a folder that can be written."""
    return Store.open().writable_root() / FOLDER / f"{device_kind(device)}.jsonl"


def require_writable(path: Path) -> None:
    """Refuse ahead of measuring what could not be written or merged afterwards: StoreError, TableError."""
    if path.exists():
        read_table(path, _ADVICE)
    require_folder(path.parent, f"the choice table {path.name}")


def write_rows(path: Path, rows: Sequence[ChoiceRow]) -> None:
    """Put rows into a table. They replace rows for the same device, rows of caches, heads and columns; others stay."""
    kept = read_table(path, _ADVICE) if path.exists() else ()
    new = {_subject(row) for row in rows}
    lines = "".join(row.to_line() for row in (*(old for old in kept if _subject(old) not in new), *rows))
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(lines)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        raise StoreError(f"{path}: the choice table cannot be written ({error.strerror})") from None


def _subject(row: ChoiceRow) -> tuple[object, ...]:
    slug = parse_slug(row.kernel)
    return row.device, slug.arch, slug.axes, row.heads, row.topk, row.extra_topk
