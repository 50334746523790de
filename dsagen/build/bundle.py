"""Bundles: the kernels of some specs in one file, which loads on a machine without a toolkit and without a store.

A bundle is a zip archive that nothing is ever extracted from:

    manifest.json                     format, specs, and for each kernel its stamp and the checksum of every member
    kernels/<entry name>/<member>     variant.json, plan.json, kernel.cu, kernel.cubin and report.json of a store entry

Its comment holds the manifest's checksum, so every byte that counts is verified before any is used. Paths in it are
names, sizes are bounded before they are read, and equal kernels give equal files wherever they are packed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsagen.build.compile import CUBIN, SOURCE
from dsagen.build.entry import PLAN, REPORT, VARIANT, BrokenEntryError, EntryStamp, StoreEntry, flush
from dsagen.build.store import is_entry_name
from dsagen.errors import SpecError, StoreError
from dsagen.output_paths import require_folder
from dsagen.spec import DeploymentSpec, load_spec

FORMAT_VERSION = 1
MEMBERS = (VARIANT, PLAN, SOURCE, CUBIN, REPORT)
MANIFEST = "manifest.json"
MOST_FILE_BYTES = 1 << 30
MOST_MANIFEST_BYTES = 16 << 20
MOST_MEMBER_BYTES = 64 << 20
MOST_MEMBERS = 20_000
MOST_DIRECTORY_BYTES = 8 << 20

_MAGIC, _END_MAGIC, _LOCATOR_MAGIC = b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x07"
# The last record of a zip archive, and the place before it where a larger one would be announced.
_END, _LOCATOR_BYTES = struct.Struct("<4s4H2LH"), 20
_COMMENT = "dsagen bundle, manifest sha256 "
_EPOCH = (1980, 1, 1, 0, 0, 0)
_PLAIN_FILE = 0o644 << 16
# What reading a damaged archive may end in.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    KeyError,
)


@dataclass(frozen=True)
class BundledSpec:
    """One deployment of a bundle: its spec, the archs that it was packed for, and its kernels' entry names."""

    spec: DeploymentSpec
    archs: tuple[str, ...]
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class BundledKernel:
    """One kernel of a bundle, every member verified."""

    stamp: EntryStamp
    variant: Mapping[str, Any]
    plan: Mapping[str, Any]
    report: Mapping[str, Any]
    source: str
    cubin: bytes


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle; `kernels` by entry name, `made_by` the version of dsagen that packed it."""

    path: Path
    size_bytes: int
    made_by: str
    specs: tuple[BundledSpec, ...]
    kernels: Mapping[str, BundledKernel]

    def choose(self, name: str | None) -> BundledSpec:
        """The spec of that name, or the only one; SpecError names those that there are."""
        names = [bundled.spec.name for bundled in self.specs]
        if name is None and len(names) == 1:
            return self.specs[0]
        if name not in names:
            found = f"no spec {name!r} in it" if name is not None else f"{len(names)} specs in it"
            raise SpecError(f"{self.path}: {found}: name one of {', '.join(names)}")
        return self.specs[names.index(name)]


def is_bundle(path: Path) -> bool:
    """Whether a file begins as a bundle does; False for what cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):
        return False


# ---- packing


def write_bundle(
    path: Path, specs: Iterable[tuple[DeploymentSpec, Sequence[str], Sequence[StoreEntry]]], made_by: str
) -> Bundle:
    """Pack specs, each with its archs and its kernels' entries, into one file; what was written, read back.

    An older bundle of that name is replaced in one step. StoreError when the file cannot be written, when there is
    another one of that name that is no bundle, and when an entry has changed since it was found.
    """
    require_free(path)
    contents: dict[str, bytes] = {}
    listed: dict[str, dict[str, Any]] = {}
    rows = []
    for spec, archs, entries in specs:
        names = [entry.name for entry in entries]
        rows.append({"spec": spec.to_mapping(), "archs": list(archs), "kernels": names})
        for entry in entries:
            if entry.name not in listed:
                listed[entry.name] = _pack_entry(entry, contents)
    manifest = _json({"format": FORMAT_VERSION, "made_by": made_by, "specs": rows, "kernels": listed})
    try:
        _write_archive(path, manifest, contents)
    except (OSError, ValueError) as error:  # a name that holds a zero byte is no OSError
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"{path!s:.200}: the bundle cannot be written ({reason}): name another place") from None
    return read_bundle(path)


def require_free(path: Path) -> None:
    """StoreError where something lies that is no bundle, which none replaces, or where no file can be made."""
    try:
        taken = path.exists() and not is_bundle(path)
    except OSError as error:
        raise StoreError(
            f"{path!s:.200}: the bundle cannot be written ({error.strerror}): name another place"
        ) from None
    if taken:
        raise StoreError(f"{path} exists and is no bundle, so it is not overwritten: name another file, or remove it")
    require_folder(path.absolute().parent, f"the bundle {path.name}")


def _pack_entry(entry: StoreEntry, contents: dict[str, bytes]) -> dict[str, Any]:
    members = {}
    for member in MEMBERS:
        try:
            content = entry.read(member)
        except BrokenEntryError as problem:
            raise StoreError(f"{entry.path} changed while it was packed: {problem}; pack it again") from None
        contents[_member_path(entry.name, member)] = content
        members[member] = {"sha256": _digest(content), "bytes": len(content)}
    return {"stamp": asdict(entry.stamp), "members": members}


def _write_archive(path: Path, manifest: bytes, contents: Mapping[str, bytes]) -> None:
    part = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.comment = f"{_COMMENT}{_digest(manifest)}".encode()
            for name, content in [(MANIFEST, manifest), *sorted(contents.items())]:
                info = zipfile.ZipInfo(name, _EPOCH)
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, _PLAIN_FILE
                archive.writestr(info, content)
        flush(part)
        part.replace(path)
        flush(part.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


# ---- reading


def read_bundle(path: Path) -> Bundle:
    """The bundle in a file with every member verified; StoreError says what is wrong with it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, and a device has no end
            raise StoreError(f"{path}: the bundle cannot be read (it is no file)")
        size = status.st_size
        if size > MOST_FILE_BYTES:
            raise _broken(path, f"{size} bytes, at most {MOST_FILE_BYTES} are read")
        _check_end(path, size)
        with zipfile.ZipFile(path) as archive:
            return _read_archive(path, size, archive)
    except OSError as error:
        raise StoreError(f"{path}: the bundle cannot be read ({error.strerror or error})") from None
    except _DAMAGE as error:
        raise _broken(path, f"{error}" or type(error).__name__) from None


def _check_end(path: Path, size: int) -> None:
    """Hold the archive's last record to what bundles have, before zipfile believes its counts."""
    length = len(_COMMENT) + 2 * hashlib.sha256().digest_size
    with path.open("rb") as file:
        file.seek(max(0, size - _LOCATOR_BYTES - _END.size - length))
        tail = file.read()
    if len(tail) != _LOCATOR_BYTES + _END.size + length or tail.startswith(_LOCATOR_MAGIC):
        raise _broken(path, "it does not end as a bundle does: a part is missing, or it is another kind of file")
    magic, _, _, _, members, directory_bytes, _, comment_bytes = _END.unpack_from(tail, _LOCATOR_BYTES)
    if magic != _END_MAGIC or comment_bytes != length or not tail[-length:].startswith(_COMMENT.encode()):
        raise _broken(path, "it does not end as a bundle does: a part is missing, or it is another kind of file")
    if members > MOST_MEMBERS or directory_bytes > MOST_DIRECTORY_BYTES:
        raise _broken(path, f"{members} members, at most {MOST_MEMBERS} are read")


def _read_archive(path: Path, size: int, archive: zipfile.ZipFile) -> Bundle:
    infos = _checked_infos(path, archive)
    text = _member(path, archive, infos[MANIFEST], MOST_MANIFEST_BYTES)
    if archive.comment.decode("ascii", "replace") != f"{_COMMENT}{_digest(text)}":
        raise _broken(path, f"{MANIFEST} does not match its checksum")
    manifest = _object(path, MANIFEST, text)
    if manifest.get("format") != FORMAT_VERSION:
        raise _broken(
            path, f"its format is {manifest.get('format')!r}, this dsagen reads {FORMAT_VERSION}: pack it again"
        )
    try:
        listed: dict[str, dict[str, Any]] = dict(manifest["kernels"])
        made_by = str(manifest["made_by"])
        wanted = {_member_path(name, member) for name in listed for member in MEMBERS}
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"{MANIFEST} lacks a part") from None
    if wanted != set(infos) - {MANIFEST}:
        odd = sorted(wanted ^ (set(infos) - {MANIFEST}))
        raise _broken(path, f"{odd[0]} is not in both, the archive and its manifest")
    kernels = {name: _read_kernel(path, archive, infos, name, row) for name, row in listed.items()}
    return Bundle(path, size, made_by, _read_specs(path, manifest, kernels), kernels)


def _checked_infos(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by name, each a name that a bundle has: no path leads anywhere."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename
        if not _is_member_path(name) or name in found:
            raise _broken(path, f"a member is named {name!r:.120}" + (" a second time" if name in found else ""))
        if info.flag_bits & 0x1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _broken(path, f"{name} is encrypted, or packed in a way that bundles are not")
        found[name] = info
    if MANIFEST not in found:
        raise _broken(path, f"no {MANIFEST} in it: it is another kind of archive")
    # zipfile looks for the archive from the file's end.
    before = min(info.header_offset for info in found.values())
    if before:
        raise _broken(path, f"{before} bytes lie in front of it")
    return found


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, most_bytes: int) -> bytes:
    """A member's content, never more than `most_bytes` of it, whatever the archive says of its size."""
    if info.file_size > most_bytes:
        raise _broken(path, f"{info.filename} has {info.file_size} bytes, at most {most_bytes} are read")
    with archive.open(info) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _broken(path, f"{info.filename} has more than {most_bytes} bytes")
    return content


def _read_kernel(
    path: Path, archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo], name: str, row: Any
) -> BundledKernel:
    content = {}
    try:
        stamp = EntryStamp(**row["stamp"])
        checksums = {member: str(row["members"][member]["sha256"]) for member in MEMBERS}
    except (KeyError, TypeError):
        raise _broken(path, f"{MANIFEST} lacks a part of {name}") from None
    if stamp.name != name or not all(isinstance(v, str) for k, v in asdict(stamp).items() if k != "schema"):
        raise _broken(path, f"{MANIFEST}: the stamp of {name} is another's")
    for member in MEMBERS:
        member_path = _member_path(name, member)
        content[member] = _member(path, archive, infos[member_path], MOST_MEMBER_BYTES)
        if _digest(content[member]) != checksums[member]:
            raise _broken(path, f"{member_path} ({len(content[member])} bytes) does not match its checksum")
    return BundledKernel(
        stamp=stamp,
        variant=_object(path, VARIANT, content[VARIANT]),
        plan=_object(path, PLAN, content[PLAN]),
        report=_object(path, REPORT, content[REPORT]),
        source=content[SOURCE].decode("utf-8", "replace"),
        cubin=content[CUBIN],
    )


def _read_specs(
    path: Path, manifest: Mapping[str, Any], kernels: Mapping[str, BundledKernel]
) -> tuple[BundledSpec, ...]:
    found: dict[str, BundledSpec] = {}
    try:
        for row in manifest["specs"]:
            spec = load_spec(dict(row["spec"]))
            names = tuple(str(name) for name in row["kernels"])
            found[spec.name] = BundledSpec(spec, tuple(str(arch) for arch in row["archs"]), names)
    except SpecError as error:
        made_by = manifest.get("made_by")
        raise StoreError(
            f"{path}: a spec in it is none for this dsagen (it was packed by {made_by!r:.40}): {error}"
        ) from None
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"{MANIFEST} lacks a part of a spec") from None
    missing = [name for bundled in found.values() for name in bundled.kernels if name not in kernels]
    if missing or not found:
        raise _broken(path, f"{missing[0]} is not in it" if missing else "no spec is in it")
    return tuple(found.values())


def _is_member_path(name: str) -> bool:
    parts = name.split("/")
    return name == MANIFEST or (
        len(parts) == 3 and parts[0] == "kernels" and is_entry_name(parts[1]) and parts[2] in MEMBERS
    )


def _member_path(entry_name: str, member: str) -> str:
    return f"kernels/{entry_name}/{member}"


def _object(path: Path, name: str, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _broken(path, f"{name} ({len(text)} bytes) is no JSON object")
    return value


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _broken(path: Path, what: str) -> StoreError:
    return StoreError(f"{path}: the bundle is broken, and nothing of it is used: {what}")
