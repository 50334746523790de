"""Shared libraries that dsagen compiles for itself: kept beside the kernels, and verified before they are loaded.

    <root>/<kind>/<name>             a library; its last bytes are a mark and the checksum of all that is before them
    <root>/<kind>/<name>.lock        held by the process that compiles it
    <root>/<kind>/<name>.<boot>-*    private folder of a compile in progress, also of a killed one
    <root>/<kind>/<name>.broken      what did not match its checksum, for its reader

Roots are searched in order; the first that can be written is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from dsagen import knobs
from dsagen.ending import cleaning_up_first, run_child
from dsagen.errors import StoreError, ToolchainError

_LOG = logging.getLogger(__name__)
# The folders of a root that hold libraries: the emulator's machine, and the launcher in C.
EMULATOR, LAUNCHER = "emulator", "launcher"
# Follows the library in its file. What loads an ELF file does not look behind its end.
_MARK = b"\ndsagen-sha256:"
_TRAILER_BYTES = len(_MARK) + 64
_DAY_S = 24 * 3600
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_WAY_OUT = f"set {knobs.CACHE_DIR.name} to a folder that can be written (several: joined by colons)"


def folders(kind: str) -> tuple[Path, ...]:
    """Where libraries of a kind may lie, in order of search. KnobError for a bad DSAGEN_CACHE_DIR."""
    return tuple(root / kind for root in knobs.CACHE_DIR.get() or (knobs.default_cache_dir(),))


def find(name: str, places: Sequence[Path]) -> Path | None:
    """The first whole library of that name, None where there is none; a broken one is logged and passed over."""
    for path in (place / name for place in places):
        if not _is_there(path):
            continue
        fault = problem(path)
        if fault is None:
            return path
        _LOG.warning("%s: the library is broken: %s", path, fault)
    return None


def obtain(what: str, name: str, places: Sequence[Path], compile_in: Callable[[Path], Path]) -> Path:
    """The library's file, verified; compiled where no place has it whole, while other processes wait.

    `compile_in` gets a private folder and returns the file that it made there; `what` is the library's name in
    messages. A broken file in the place that is written is set aside. StoreError that names DSAGEN_CACHE_DIR where no
    place can be written.
    """
    found = find(name, places)
    if found is not None:
        return found
    folder = _writable(what, places)
    target = folder / name
    try:
        with _locked(folder / f"{name}.lock"):
            if _is_there(target) and problem(target) is None:
                return target
            _sweep(folder, name)
            _make(target, compile_in)
    except OSError as error:
        raise StoreError(f"{target}: {what} cannot be kept: {error.strerror or error}: {_WAY_OUT}") from None
    return target


def problem(path: Path) -> str | None:
    """What is wrong with a library's file, None where it is what was compiled."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    body, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if not trailer.startswith(_MARK):
        return f"no checksum at its end ({len(content)} bytes): it was cut short, or another program wrote it"
    if trailer[len(_MARK) :] != hashlib.sha256(body).hexdigest().encode():
        return f"it does not match its checksum ({len(content)} bytes)"
    return None


def survey(root: Path) -> tuple[list[str], dict[str, str]]:
    """Of one root: names of whole libraries, and what is wrong with each broken one, as `<kind>/<name>`."""
    whole: list[str] = []
    broken: dict[str, str] = {}
    for kind in (EMULATOR, LAUNCHER):
        for path in _listed(root / kind):
            if path.suffix != ".so":
                continue
            fault = problem(path)
            if fault is None:
                whole.append(f"{kind}/{path.name}")
            else:
                broken[f"{kind}/{path.name}"] = fault
    return whole, broken


def run_compiler(what: str, command: Sequence[str]) -> None:
    """Run a compiler. ToolchainError with what it said and the way out where it fails or cannot be started."""
    compiler = Path(command[0]).name
    try:
        done = run_child(command)
    except OSError as error:
        raise ToolchainError(
            f"{what} does not compile: {command[0]} cannot be run ({error.strerror}): put a {compiler} that works "
            "first on PATH"
        ) from None
    if done.returncode != 0:
        said = done.stderr[-4000:].strip() or "it printed nothing"
        raise ToolchainError(
            f"{what} does not compile: {command[0]} ended with {done.returncode}: put a {compiler} that works first on "
            f"PATH, or mend what it says\n  command: {' '.join(command)}\n{said}"
        )


@cache
def boot_mark() -> str:
    """Digits that are the same for all processes among which a lock surely holds: those of one running kernel."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = ""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def is_older_than_a_day(path: Path) -> bool:
    """Whether nothing has touched a folder for a day; False for one that cannot be looked at."""
    try:
        return path.stat().st_mtime < time.time() - _DAY_S
    except OSError:
        return False


def _make(target: Path, compile_in: Callable[[Path], Path]) -> None:
    """Compile, seal and rename: half a file never has the name. The lock must be held."""
    with cleaning_up_first():
        _make_in(Path(tempfile.mkdtemp(prefix=f"{target.name}.{boot_mark()}-", dir=target.parent)), target, compile_in)


def _make_in(scratch: Path, target: Path, compile_in: Callable[[Path], Path]) -> None:
    try:
        made = compile_in(scratch)
        with made.open("r+b") as file:
            checksum = hashlib.sha256(file.read()).hexdigest()
            file.write(_MARK + checksum.encode())
            file.flush()
            os.fsync(file.fileno())
        if _is_there(target):
            aside = target.with_name(f"{target.name}.broken")
            target.replace(aside)
            _LOG.warning("%s was broken; kept as %s", target, aside.name)
        made.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(folder: Path, name: str) -> None:
    """Remove what killed compiles left; the lock of `name` must be held.

    What belongs to another library, another machine or this one before it was started anew is left alone for a day,
    and so are folders without a library's name, which older versions left.
    """
    for path in _listed(folder):
        is_own = path.name.startswith(f"{name}.{boot_mark()}-")
        is_scratch = ".so." in path.name or path.name.startswith("tmp")
        if (is_own or (is_scratch and is_older_than_a_day(path))) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _writable(what: str, places: Sequence[Path]) -> Path:
    problems = []
    for folder in places:
        try:
            if any(part in PACKAGE_FOLDERS for part in folder.resolve().parts):
                problems.append(f"{folder} (inside an installed package, where dsagen never writes)")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder  # permissions alone do not tell: it may be a read-only layer of a container
        except (OSError, RuntimeError) as error:  # the latter is a loop of symbolic links before Python 3.13
            reason = error.strerror if isinstance(error, OSError) else None
            problems.append(f"{folder} ({reason or error})")
    raise StoreError(
        f"{what} is not in the kernel store yet, and no folder of it can be written: {', '.join(problems)}: {_WAY_OUT}"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be locked ({error.strerror}): put the store on a file system that has locks (flock), "
                f"with {knobs.CACHE_DIR.name}"
            ) from None
        yield


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder on the way that may not be searched
        return False


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
