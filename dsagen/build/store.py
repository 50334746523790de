"""The content-addressed kernel store.

    <root>/v1/<slug>.<12 hex>/   a committed entry (see entry.py); the digits are of source, flags and compiler version
    <root>/v1/.locks/            one lock file per entry; the lock is the kernel's, so it dies with its holder
    <root>/v1/.work/             private folders of builds in progress, <entry>.<boot>-<random>, also of killed ones
    <root>/v1/.failed/           source and log of kernels that did not compile, for their reader

Several roots are searched in order; the first that can be written is written. With a toolchain at hand, an entry of
another compiler version is no hit. Without one, any version of the same source is, the newest first.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from dsagen import knobs
from dsagen.build.entry import BrokenEntryError, EntryStamp, StoreEntry, commit_entry, flush, read_entry, read_stamp
from dsagen.build.key import NAME_HEX_DIGITS, SCHEMA_VERSION, entry_key, entry_name, source_key
from dsagen.build.patience import patiently
from dsagen.build.toolchain import Toolchain
from dsagen.build.unit import Unit
from dsagen.errors import StoreError
from dsagen.kept_library import PACKAGE_FOLDERS, boot_mark, is_older_than_a_day

_LOG = logging.getLogger(__name__)
_VERSION_FOLDER = f"v{SCHEMA_VERSION}"
_LOCKS, _WORK, _FAILED = ".locks", ".work", ".failed"
_ENTRY_NAME = re.compile(rf".+\.[0-9a-f]{{{NAME_HEX_DIGITS}}}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
# nvcc writes its input's path into the PTX as it is, and ninja takes a line for a statement.
_UNFIT_CHARACTERS = '"\\\n\r'


class EntryLock:
    """An exclusive lock on one entry's name, across processes and threads; the system frees it if its holder dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self, wait: bool) -> bool:
        """True once the lock is held; with `wait` False, False at once when another holds it.

        StoreError on a file system that has no locks.
        """
        handle = patiently(lambda: os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        try:
            patiently(lambda: fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)))
        except BlockingIOError:
            os.close(handle)
            return False
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError):
                raise StoreError(
                    f"{self._path}: cannot be locked ({error.strerror}): put the store on a file system that has "
                    "locks (flock), with DSAGEN_CACHE_DIR"
                ) from None
            raise
        self._handle = handle
        return True

    def release(self) -> None:
        """Free the lock; nothing happens when it is not held. The file stays, for removing it would race."""
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                # Unlocked by word, since a process forked meanwhile shares the handle and would keep the lock.
                patiently(lambda: fcntl.flock(handle, fcntl.LOCK_UN))
            finally:
                os.close(handle)

    def __enter__(self) -> EntryLock:
        self.acquire(wait=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True)
class Lookup:
    """A look-up's result: the entry, or None with the reason for the miss."""

    entry: StoreEntry | None
    reason: str


class Store:
    """The kernel store over one or more root folders. Opening and reading create nothing."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self._writable: Path | None = None

    @classmethod
    def open(cls) -> Store:
        """The store of DSAGEN_CACHE_DIR, else of the user's cache folder; raises KnobError for a bad value."""
        return cls(knobs.CACHE_DIR.get() or (knobs.default_cache_dir(),))

    def lookup(self, unit: Unit, toolchain: Toolchain | None = None) -> StoreEntry | None:
        """The verified entry of this unit, or None.

        With a toolchain only an entry compiled by its version counts; without, one of any version.
        """
        return self.examine(unit, toolchain).entry

    def examine(self, unit: Unit, toolchain: Toolchain | None) -> Lookup:
        """As `lookup`, with the reason for a miss. A broken entry is a miss that is logged, and is left where it is."""
        source = source_key(unit)
        reason = ""
        for folder in self._candidates(unit.slug, source, toolchain):
            try:
                entry = read_entry(folder)
            except BrokenEntryError as problem:
                reason = f"the entry is broken: {problem}"
                _LOG.warning("%s: %s", folder, reason)
                continue
            expected = entry_key(source, toolchain.version) if toolchain else None
            if entry and entry.stamp.source_key == source and expected in (None, entry.stamp.key):
                return Lookup(entry, "hit")
        return Lookup(None, reason or self._why_missing(unit.slug, source))

    def _why_missing(self, slug: str, source: str) -> str:
        """What the store has of a kernel that it lacks: nothing, or builds by other compilers or of other text."""
        stamps = []
        for folder in (folder for root in self.roots for folder in _entry_folders(root, f"{slug}.")):
            with contextlib.suppress(BrokenEntryError):
                marker = read_stamp(folder)
                stamps += [marker[0]] if marker else []
        versions = sorted({stamp.nvcc_version for stamp in stamps if stamp.source_key == source}, key=_version_order)
        if versions:
            return f"compiled by nvcc {', '.join(versions)} only"
        return "its text or flags have changed" if stamps else "not in the store"

    def entries(self) -> list[StoreEntry]:
        """Every whole entry, by name; of several roots the first that holds it. Broken ones are logged and left out."""
        found: dict[str, StoreEntry] = {}
        for folder in (folder for root in self.roots for folder in _entry_folders(root)):
            try:
                entry = read_entry(folder) if folder.name not in found else None
            except BrokenEntryError as problem:
                _LOG.warning("%s: the entry is broken: %s", folder, problem)
                continue
            if entry:
                found[entry.name] = entry
        return [found[name] for name in sorted(found)]

    def survey(self, root: Path) -> tuple[list[StoreEntry], dict[str, str], list[str]]:
        """Of one root: whole entries, what is wrong with each broken one by name, and names of those set aside."""
        whole, broken = [], {}
        for folder in _entry_folders(root):
            try:
                entry = read_entry(folder)
            except BrokenEntryError as problem:
                broken[folder.name] = str(problem)
                continue
            whole += [entry] if entry else []
        try:
            names = sorted(path.name for path in patiently(partial(_listed, root / _VERSION_FOLDER)))
        except OSError:
            names = []
        return whole, broken, [name for name in names if ".broken-" in name]

    def clear(self, pattern: str = "*") -> list[str]:
        """Remove from the writable root the entries, broken ones too, whose slug matches a shell pattern; their names.

        An entry that is being built is waited for. Raises StoreError where no root can be written.
        """
        self.writable_root()
        removed = []
        for path in self.matching(pattern):
            name = _entry_name_of(path)
            try:
                with self.lock(name):
                    self.sweep(name)
                    shutil.rmtree(path.parent / _FAILED / name, ignore_errors=True)
                    self._discard(path)
            except FileNotFoundError:  # another one was quicker
                continue
            except OSError as error:
                raise StoreError(f"{path} cannot be removed: {error.strerror}") from None
            removed.append(path.name)
        return removed

    def matching(self, pattern: str = "*") -> list[Path]:
        """What `clear` would remove: folders of the first writable root; nothing is created."""
        for root in self.roots:
            base = root / _VERSION_FOLDER
            if self._writable in (None, root) and os.access(base, os.W_OK | os.X_OK):
                found = sorted(patiently(partial(_listed, base)))
                return [path for path in found if fnmatch.fnmatchcase(_slug_of(path), pattern) and _slug_of(path)]
        return []

    def writable_root(self) -> Path:
        """The first root that can be written, created if need be; raises StoreError naming DSAGEN_CACHE_DIR."""
        if self._writable is None:
            problems = []
            for root in self.roots:
                problem = _prepare_root(root)
                if problem is None:
                    self._writable = root
                    break
                problems.append(f"{root} ({problem})")
            else:
                raise StoreError(
                    f"no folder of the kernel store can be written: {', '.join(problems)}. "
                    "Set DSAGEN_CACHE_DIR to a folder that can (several: joined by colons; the others are read)."
                )
        return self._writable

    def lock(self, name: str) -> EntryLock:
        """The lock of an entry in the writable root, not yet acquired."""
        return EntryLock(self.writable_root() / _VERSION_FOLDER / _LOCKS / f"{name}.lock")

    def make_work_dir(self, name: str) -> Path:
        """A fresh private folder for building `name`; its lock must be held."""
        folder = self.writable_root() / _VERSION_FOLDER / _WORK
        return Path(patiently(lambda: tempfile.mkdtemp(prefix=f"{name}.{boot_mark()}-", dir=folder)))

    def sweep_abandoned(self) -> None:
        """Remove what builds have left that died, of any entry: those whose lock nobody holds any more."""
        folder = self.writable_root() / _VERSION_FOLDER / _WORK
        # Tidying: a folder that resists is no reason not to build.
        with contextlib.suppress(OSError, StoreError):
            for name in sorted({path.name.rpartition(".")[0] for path in folder.iterdir()}):
                lock = self.lock(name)
                if _ENTRY_NAME.fullmatch(name) and lock.acquire(wait=False):
                    try:
                        self.sweep(name)
                    finally:
                        lock.release()

    def sweep(self, name: str) -> None:
        """Remove what killed builds of `name` left; its lock must be held.

        On a network file system a lock may reach no further than this machine, so what another one has made, or this
        one before it was started anew, is left alone for a day.
        """
        folder = self.writable_root() / _VERSION_FOLDER / _WORK
        for path in patiently(partial(_listed, folder)):
            if path.name.startswith(f"{name}.") and (f".{boot_mark()}-" in path.name or is_older_than_a_day(path)):
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, folder: Path, stamp: EntryStamp, texts: Mapping[str, Any]) -> StoreEntry:
        """Commit a private folder under its final name; the entry's lock must be held.

        What was there before is set aside first: a broken entry as `<name>.broken-<pid>`, a whole one is removed.
        Raises BrokenEntryError when the folder is not whole, StoreError when the disk refuses.
        """
        base = self.writable_root() / _VERSION_FOLDER
        final = base / stamp.name
        try:
            commit_entry(folder, stamp, texts)
            self._set_aside(final)
            patiently(lambda: folder.rename(final))
            flush(base)
        except OSError as error:
            raise StoreError(
                f"{final} cannot be written: {error}. DSAGEN_CACHE_DIR names the store's folder."
            ) from None
        try:
            entry = read_entry(final)
        except BrokenEntryError as problem:
            raise StoreError(f"{final} was broken right after it was written ({problem}): is its disk sound?") from None
        if entry is None:
            raise StoreError(
                f"{final} vanished right after it was written; does something else clean DSAGEN_CACHE_DIR?"
            )
        shutil.rmtree(base / _FAILED / stamp.name, ignore_errors=True)
        return entry

    def keep_failed(self, folder: Path, name: str) -> Path:
        """Move a failed build's folder to where its reader finds it, in place of an older one; its new path."""
        target = self.writable_root() / _VERSION_FOLDER / _FAILED / name
        patiently(lambda: target.parent.mkdir(exist_ok=True))
        shutil.rmtree(target, ignore_errors=True)
        patiently(lambda: folder.rename(target))
        return target

    def _candidates(self, slug: str, source: str, toolchain: Toolchain | None) -> Iterable[Path]:
        if toolchain is not None:
            name = entry_name(slug, entry_key(source, toolchain.version))
            return [root / _VERSION_FOLDER / name for root in self.roots]
        found: list[tuple[tuple[int, ...], int, Path]] = []
        for order, root in enumerate(self.roots):
            for folder in _entry_folders(root, f"{slug}."):
                try:
                    marker = read_stamp(folder)
                except BrokenEntryError:
                    # Kept as a candidate, so that `examine` reports it.
                    found.append(((0,), -order, folder))
                    continue
                if marker and marker[0].source_key == source:
                    found.append((_version_order(marker[0].nvcc_version), -order, folder))
        return [folder for _, _, folder in sorted(found, reverse=True)]

    def _set_aside(self, final: Path) -> None:
        try:
            whole = read_entry(final) is not None
        except BrokenEntryError as problem:
            aside = _unused_name(final)
            patiently(lambda: final.rename(aside))
            _LOG.warning("%s was broken (%s); kept as %s", final, problem, aside.name)
            return
        if whole:
            self._discard(final)

    def _discard(self, folder: Path) -> None:
        """Remove a folder: first its name, in one step, so that no reader sees half of it."""
        grave = self.make_work_dir(folder.name.split(".broken-")[0])
        patiently(lambda: folder.rename(grave / "old"))
        # A network file system may hold a file that is open elsewhere; the next build's sweep removes the rest.
        shutil.rmtree(grave, ignore_errors=True)


def _prepare_root(root: Path) -> str | None:
    """Create a root's folders; None when it can be written, else why not."""
    if any(character in _UNFIT_CHARACTERS or "\ud800" <= character <= "\udfff" for character in str(root)):
        return "its name holds a quote, a backslash, a line break or no UTF-8, which the compilers do not take"
    try:
        if any(part in PACKAGE_FOLDERS for part in root.resolve().parts):
            return "inside an installed package, where dsagen never writes"
        patiently(lambda: _make_folders(root))
        return None
    except OSError as error:
        return error.strerror or str(error)
    except RuntimeError as error:  # how a loop of symbolic links is told before Python 3.13
        return str(error)


def _make_folders(root: Path) -> None:
    for name in (_LOCKS, _WORK):
        (root / _VERSION_FOLDER / name).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root / _VERSION_FOLDER / _WORK):
        pass  # permissions alone do not tell: it may be a read-only layer of a container


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def _entry_folders(root: Path, prefix: str = "") -> list[Path]:
    """The folders of a root that carry an entry's name and start with `prefix`; of a missing root, none."""
    base = root / _VERSION_FOLDER
    try:
        listed = [path.name for path in patiently(partial(_listed, base))]
    except OSError:
        return []
    names = [name for name in listed if name.startswith(prefix) and _ENTRY_NAME.fullmatch(name)]
    return [base / name for name in sorted(names) if name.rpartition(".")[0] == prefix[:-1] or not prefix]


def is_entry_name(name: str) -> bool:
    """Whether a text is the name of an entry: a slug and digits, which leads to no other folder."""
    return bool(_PLAIN_NAME.fullmatch(name) and _ENTRY_NAME.fullmatch(name))


def _entry_name_of(path: Path) -> str:
    """The entry's name of a folder, which is set aside as a broken one or not; empty where it is none."""
    name = path.name.split(".broken-")[0]
    return name if _ENTRY_NAME.fullmatch(name) else ""


def _slug_of(path: Path) -> str:
    return _entry_name_of(path).rpartition(".")[0]


def _unused_name(final: Path) -> Path:
    names = {path.name for path in patiently(partial(_listed, final.parent))}
    wanted = f"{final.name}.broken-{os.getpid()}"
    numbered = (f"{wanted}-{number}" for number in range(2, len(names) + 3))
    return final.with_name(next(name for name in (wanted, *numbered) if name not in names))


def _version_order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
