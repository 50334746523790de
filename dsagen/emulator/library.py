"""The machine as a shared library: compiled on first use, kept by the content of its sources and the CPU's features."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dsagen import kept_library, knobs
from dsagen.emulator.operations import LOCAL_WINDOW, PARAM_WINDOW, SHARED_RESERVE
from dsagen.errors import EmulatorError, StoreError, ToolchainError

_LOG = logging.getLogger(__name__)
WHAT = "the emulator's machine"
COMPILE_NOTE = f"compiling {WHAT} with g++: once for a store and a kind of CPU, up to a minute"
SOURCES = Path(__file__).parent / "vm"
_FLAGS = (
    "-std=c++17", "-O2", "-ftree-vectorize", "-march=native", "-fPIC", "-pthread",
    # Each operation rounds once, as the device's does.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-strict-aliasing", "-fwrapv",
    # Nobody replaces the library's functions, so that they may be inlined and called directly.
    "-fno-semantic-interposition", "-Wl,-Bsymbolic",
)  # fmt: skip


class LaunchBlock(ctypes.Structure):
    """vm::Launch of vm/machine.h, field by field."""

    _fields_ = (
        ("code", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("ptx_lines", ctypes.c_void_p),
        ("cuda_lines", ctypes.c_void_p),
        ("preloads", ctypes.c_void_p),
        ("unknown", ctypes.c_void_p),
        ("regions", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("instructions", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("predicates", ctypes.c_uint32),
        ("preload_count", ctypes.c_uint32),
        ("region_count", ctypes.c_uint32),
        ("param_bytes", ctypes.c_uint32),
        ("local_bytes", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("dynamic_shared_bytes", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("os_threads", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("instruction_limit", ctypes.c_uint64),
        ("counters", ctypes.c_uint64 * 4),
        ("message", ctypes.c_char * 4096),
        ("meter", ctypes.c_void_p),
    )


class RegionRow(ctypes.Structure):
    """vm::Region of vm/machine.h."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("host", ctypes.c_void_p),
        ("writable", ctypes.c_uint32),
        ("after_wait", ctypes.c_uint32),
        ("valid", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
    )


@dataclass(frozen=True)
class Library:
    """The loaded machine; `numbers` gives the number of each instruction by name. `name` tells its build apart."""

    handle: ctypes.CDLL
    numbers: Mapping[str, int]
    name: str
    folder: Path


@cache
def load_library(folder: Path | None = None) -> Library:
    """The machine, compiled into `folder` (by default below the kernel store's roots) where it is not there yet.

    It is verified before it is loaded. ToolchainError where there is no g++ or it fails, StoreError where no folder can
    be written or the library cannot be loaded from it.
    """
    places = _folders() if folder is None else (folder,)
    path = kept_library.obtain(WHAT, _name(), places, _compile_in)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise StoreError(
            f"{path}: {WHAT} cannot be loaded ({error}): if its file system forbids to execute, set "
            f"{knobs.CACHE_DIR.name} to a folder of another one"
        ) from None
    handle.vm_instruction_name.restype = ctypes.c_char_p
    handle.vm_run.argtypes = (ctypes.POINTER(LaunchBlock),)
    handle.vm_open.argtypes, handle.vm_open.restype = (ctypes.POINTER(LaunchBlock),), ctypes.c_void_p
    for name, words in (("close", 0), ("turn", 0), ("step", 2), ("land", 1), ("is_resident", 1), ("predicate", 3)):
        getattr(handle, f"vm_{name}").argtypes = (ctypes.c_void_p, *(ctypes.c_uint32,) * words)
    handle.vm_predicate.restype = ctypes.c_uint32
    for name, words in (("lanes", 2), ("slot", 3), ("shared", 1)):
        getattr(handle, f"vm_{name}").argtypes = (ctypes.c_void_p, *(ctypes.c_uint32,) * words, ctypes.c_void_p)
    if handle.vm_launch_bytes() != ctypes.sizeof(LaunchBlock):
        raise EmulatorError("vm::Launch and LaunchBlock differ in size: both must have the same fields")
    handle.vm_address.restype = ctypes.c_uint64
    stated = (SHARED_RESERVE, LOCAL_WINDOW, PARAM_WINDOW)
    if tuple(handle.vm_address(n) for n in range(len(stated))) != stated:
        raise EmulatorError("vm/machine.h and operations.py differ in where shared, local or parameter memory begins")
    names = [handle.vm_instruction_name(n).decode() for n in range(handle.vm_instruction_count())]
    return Library(handle, {name: number for number, name in enumerate(names)}, path.stem, path.parent)


def is_kept() -> bool:
    """Whether the machine is in the store, so that loading it compiles nothing."""
    return kept_library.find(_name(), _folders()) is not None


def _folders() -> Sequence[Path]:
    return kept_library.folders(kept_library.EMULATOR)


def _name() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(" ".join(_FLAGS).encode() + _cpu_features())
    return f"vm-{digest.hexdigest()[:16]}.so"


def _cpu_features() -> bytes:
    """What -march=native looks at, since a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return b""
    return next((line.encode() for line in lines if line.startswith(("flags", "Features"))), b"")


def _compile_in(folder: Path) -> Path:
    """Compile the sources, as many at once as there are cores, and link; the library's file."""
    compiler = shutil.which("g++", path=knobs.foreign("PATH"))
    if compiler is None:
        raise ToolchainError("no g++ on PATH: the emulator compiles its machine with it on first use. Install g++.")
    _LOG.info(COMPILE_NOTE)

    def compile_one(source: Path) -> str:
        out = str(folder / f"{source.stem}.o")
        kept_library.run_compiler(WHAT, [compiler, *_FLAGS, "-c", str(source), "-o", out])
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    library = folder / "machine.so"
    kept_library.run_compiler(WHAT, [compiler, *_FLAGS, "-shared", *objects, "-o", str(library)])
    return library
