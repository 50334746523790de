"""One store entry: a folder whose marker file, written last, holds the checksum of every member.

A folder under its final name is complete: it was filled, checksummed and flushed under a private name and then renamed.
The marker is what proves that later, after a power cut, a full disk or a careless copy.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsagen.build.compile import CUBIN, LOG, PTX, SOURCE
from dsagen.build.key import SCHEMA_VERSION
from dsagen.build.patience import patiently

VARIANT, PLAN, REPORT, MARKER = "variant.json", "plan.json", "report.json", "committed.json"
MEMBERS = (VARIANT, PLAN, SOURCE, PTX, CUBIN, LOG, REPORT)
_ELF_MAGIC = b"\x7fELF"


class BrokenEntryError(Exception):
    """An entry's folder exists but is incomplete or changed; the text says how."""


@dataclass(frozen=True)
class EntryStamp:
    """What the marker says beside the checksums; keys are 64 hex digits, `nvcc_version` is like "13.0.88"."""

    name: str
    slug: str
    symbol: str
    arch: str
    source_key: str
    key: str
    nvcc_version: str
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True)
class StoreEntry:
    """A committed kernel on disk. `report` holds the figures of ptxas, the commands, and the seconds they took.

    `checksums` are those of the members, sha256 in hex by name.
    """

    path: Path
    stamp: EntryStamp
    variant: Mapping[str, Any]
    plan: Mapping[str, Any]
    report: Mapping[str, Any]
    checksums: Mapping[str, str]

    @property
    def name(self) -> str:
        """`<slug>.<12 hex digits>`, the folder's name."""
        return self.stamp.name

    @property
    def slug(self) -> str:
        """The variant's slug."""
        return self.stamp.slug

    @property
    def symbol(self) -> str:
        """The kernel's entry function in the cubin."""
        return self.stamp.symbol

    @property
    def arch(self) -> str:
        """The arch, such as "sm_90a"."""
        return self.stamp.arch

    @property
    def nvcc_version(self) -> str:
        """The compiler's version, such as "13.0.88"."""
        return self.stamp.nvcc_version

    @property
    def source_path(self) -> Path:
        """The complete CUDA text."""
        return self.path / SOURCE

    @property
    def ptx_path(self) -> Path:
        """The PTX that the cubin was assembled from."""
        return self.path / PTX

    @property
    def cubin_path(self) -> Path:
        """The device code to load."""
        return self.path / CUBIN

    @property
    def log_path(self) -> Path:
        """What the compilers printed."""
        return self.path / LOG

    def read(self, member: str) -> bytes:
        """A member's content, of this very entry: BrokenEntryError where it has changed or gone since it was found."""
        return _verified(self.path, member, self.checksums[member])


def read_stamp(folder: Path) -> tuple[EntryStamp, dict[str, str]] | None:
    """(stamp, sha256 by member) from a folder's marker; None where there is no folder.

    Raises BrokenEntryError for a folder without a readable marker of this schema.
    """
    try:
        text = _read_bytes(folder / MARKER)
    except (FileNotFoundError, NotADirectoryError):
        if not _is_folder(folder):
            return None
        raise BrokenEntryError(f"{MARKER} is missing") from None
    except OSError as error:
        raise BrokenEntryError(f"{MARKER} cannot be read ({error.strerror})") from None
    try:
        content = json.loads(text)
        checksums = {str(name): str(value) for name, value in content.pop("members").items()}
        stamp = EntryStamp(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BrokenEntryError(f"{MARKER} is damaged ({len(text)} bytes)") from None
    if not all(isinstance(value, str) for name, value in asdict(stamp).items() if name != "schema"):
        raise BrokenEntryError(f"{MARKER} is damaged (not every member is text)")
    if stamp.schema != SCHEMA_VERSION or stamp.name != folder.name or set(checksums) != set(MEMBERS):
        raise BrokenEntryError(f"{MARKER} belongs to another entry or schema")
    return stamp, checksums


def read_entry(folder: Path) -> StoreEntry | None:
    """The entry in `folder` with every member verified; None where there is none; raises BrokenEntryError."""
    found = read_stamp(folder)
    if found is None:
        return None
    stamp, checksums = found
    content = {member: _verified(folder, member, checksums[member]) for member in MEMBERS}
    return StoreEntry(
        path=folder,
        stamp=stamp,
        variant=_mapping(VARIANT, content[VARIANT]),
        plan=_mapping(PLAN, content[PLAN]),
        report=_mapping(REPORT, content[REPORT]),
        checksums=checksums,
    )


def _verified(folder: Path, member: str, checksum: str) -> bytes:
    try:
        content = _read_bytes(folder / member)
    except OSError as error:
        raise BrokenEntryError(f"{member} cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest() != checksum:
        raise BrokenEntryError(f"{member} ({len(content)} bytes) does not match its checksum")
    return content


def _mapping(member: str, text: bytes) -> dict[str, Any]:
    """A JSON member; BrokenEntryError for what is no object, which a matching checksum does not rule out."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BrokenEntryError(f"{member} ({len(text)} bytes) is no JSON object")
    return value


def commit_entry(folder: Path, stamp: EntryStamp, texts: Mapping[str, Any]) -> None:
    """Complete a private folder that holds source, PTX, cubin and log: write the JSON members, then the marker.

    `texts` maps variant.json, plan.json and report.json to their values. Everything is flushed to disk, the marker
    last. Raises BrokenEntryError when a member is missing or empty, or the cubin is no ELF file.
    """
    for member, value in texts.items():
        _write_text(folder / member, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")
    checksums = {}
    for member in MEMBERS:
        try:
            content = _read_bytes(folder / member)
        except FileNotFoundError:
            raise BrokenEntryError(f"the compile left no {member}") from None
        if not content or (member == CUBIN and not content.startswith(_ELF_MAGIC)):
            raise BrokenEntryError(f"the compile left a {member} of {len(content)} bytes that is not whole")
        checksums[member] = hashlib.sha256(content).hexdigest()
        flush(folder / member)
    marker = folder / MARKER
    _write_text(marker, json.dumps({**asdict(stamp), "members": checksums}, indent=1) + "\n")
    flush(marker)
    flush(folder)


def _write_text(path: Path, text: str) -> None:
    patiently(lambda: path.write_text(text))


def flush(path: Path) -> None:
    """Force a file or a folder to disk; a file system that cannot flush folders is let be."""
    patiently(lambda: _flush_once(path))


def _flush_once(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)


def _read_bytes(path: Path) -> bytes:
    """The file's content; a stale network handle is opened once more, since the second look-up finds the new file."""
    return patiently(lambda: _read_file(path))


def _is_folder(path: Path) -> bool:
    try:
        return patiently(path.is_dir)
    except OSError:  # it cannot be looked at, so there is no entry to be had
        return False


def _read_file(path: Path) -> bytes:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))  # opening a pipe would wait
    return path.read_bytes()
