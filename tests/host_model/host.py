"""Rendered units on the CPU: compiled by a host C++ compiler against models of the ptx prims, run block after block."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from dsagen.plan import KernelPlan
from dsagen.render import read_header, render

FOLDER = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"dsagen-host-model-{os.getuid()}"
COMPILER = shutil.which("g++")
_FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-misleading-indentation",
    "-Wno-unused",
]
# Undefined behaviour of the body traps; the machine turns the trap into a message.
_BODY_FLAGS = [
    "-fsanitize=bounds,alignment,shift,signed-integer-overflow,float-cast-overflow,bool",
    "-fsanitize-undefined-trap-on-error",
]
_STRUCT = re.compile(r"^struct SharedStorage \{.*?^\};", re.DOTALL | re.MULTILINE)
_MEMBER = re.compile(r"\b(u32|i32|float) (\w+\[)")
_PACK = {"pointer": "Q", "u64": "Q", "i64": "q", "u32": "I", "i32": "i", "f32": "f"}
_PAGE = mmap.PAGESIZE
_SLACK_BYTE = 0xEE
_PROT_NONE, _PROT_READ = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)


class HostModelError(AssertionError):
    """The machine stopped a launch: an illegal access, a race, a deadlock, a diverged warp."""


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("predecessors", ctypes.c_int),
        ("name", ctypes.c_char * 36),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("enter", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_uint),
        ("grid", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("smem_bytes", ctypes.c_uint),
        ("registers", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Counts:
    """What a launch did: completed block barriers and warp collectives over all blocks."""

    barriers: int
    collectives: int


class Memory:
    """Global memory: each tensor at the end of its pages, which lie between forbidden ones. Inputs are read-only."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._regions: dict[str, tuple[int, int]] = {}
        self._slack: dict[str, np.ndarray] = {}

    def input(self, name: str, values: np.ndarray) -> np.ndarray:
        """A read-only copy of a contiguous array."""
        array = self._place(name, values)
        begin = array.ctypes.data // _PAGE * _PAGE
        _protect(begin, array.ctypes.data + array.nbytes - begin, _PROT_READ)
        return array

    def output(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """A writable array of 0xff bytes, which are NaN for every float type."""
        return self._place(
            name, np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 255, np.uint8).view(dtype).reshape(shape)
        )

    def _place(self, name: str, values: np.ndarray) -> np.ndarray:
        taken = -(-max(values.nbytes, 1) // _PAGE) * _PAGE
        pages = mmap.mmap(-1, taken + 2 * _PAGE)
        start = _PAGE + (taken - values.nbytes) // 16 * 16
        slack = np.frombuffer(pages, np.uint8, start - _PAGE, _PAGE)
        slack[...] = _SLACK_BYTE
        base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        array = np.frombuffer(pages, values.dtype, values.size, start).reshape(values.shape)
        array[...] = values
        _protect(base, _PAGE, _PROT_NONE)
        _protect(base + _PAGE + taken, _PAGE, _PROT_NONE)
        self._maps.append(pages)
        self._slack[name] = slack
        self._regions[name] = (base + start, base + start + values.nbytes)
        return array

    def written_slack(self) -> list[str]:
        """Tensors before whose first byte, within its page, something was written."""
        return [name for name, slack in self._slack.items() if (slack != _SLACK_BYTE).any()]

    def regions(self, predecessors: tuple[str, ...]) -> ctypes.Array[_Region]:
        """The tensors for the machine."""
        rows = [
            _Region(begin, end, name in predecessors, name.encode()) for name, (begin, end) in self._regions.items()
        ]
        return (_Region * len(rows))(*rows)


def _protect(address: int, size_bytes: int, protection: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def read_model(name: str, read: Callable[[str], str] = read_header) -> str:
    """Header texts for the host: the ptx prims and the types come from the models, the rest from the templates."""
    if name == "prims/types.cuh" or name.startswith("prims/ptx/"):
        path = FOLDER / "ptx" / Path(name).name
        if not path.is_file():
            raise HostModelError(f"{name} has no model: write tests/host_model/ptx/{path.name}")
        return path.read_text(encoding="utf-8")
    return read(name)


def cuda_arch(arch: str) -> int:
    """`__CUDA_ARCH__` of an arch name such as sm_90a."""
    return int(re.sub(r"\D", "", arch)) * 10


class HostKernel:
    """A plan's kernel, compiled for the CPU."""

    def __init__(self, plan: KernelPlan, unit_text: str | None = None) -> None:
        self.plan = plan
        text = unit_text if unit_text is not None else render(plan, read_model).text
        # Plain accesses of scalar members of the shared-memory struct are checked as well.
        text = _STRUCT.sub(lambda match: _MEMBER.sub(r"host::SharedCell<\1> \2", match[0]), text)
        call = f"{plan.symbol}(*static_cast<const Params*>(params))"
        text += f'\nextern "C" void host_enter(const void* params) {{ {call}; }}\n'
        machine = _machine()
        self._run = machine.host_run
        self._library = ctypes.CDLL(str(_compile_unit(text, cuda_arch(plan.variant.arch))))

    def launch(
        self,
        grid: int,
        params: Mapping[str, int | float | np.ndarray | None],
        memory: Memory,
        seed: int = 1,
        predecessors: tuple[str, ...] = (),
    ) -> Counts:
        """Run `grid` blocks. Pointers are given as arrays (their address counts) or None. HostModelError names a fault.

        `predecessors` are tensors that the grid before writes: where the plan overlaps it, they stay closed until the
        kernel's dependency wait.
        """
        block = ctypes.create_string_buffer(self.pack(params), self.plan.params_bytes)
        regions = memory.regions(predecessors if self.plan.overlaps_previous else ())
        launch = _Launch(
            ctypes.cast(self._library.host_enter, ctypes.c_void_p),
            ctypes.cast(block, ctypes.c_void_p),
            regions,
            len(regions),
            grid,
            self.plan.threads,
            self.plan.smem_bytes,
            self.plan.registers_cap,
            seed,
        )
        message = self._run(ctypes.byref(launch))
        if message is not None:
            raise HostModelError(f"{self.plan.slug}: {message.decode()}; lines are of {self._library._name}.cpp")
        for name in memory.written_slack():
            raise HostModelError(f"{self.plan.slug}: {name}: bytes before it were written")
        return Counts(launch.barriers, launch.collectives)

    def pack(self, params: Mapping[str, int | float | np.ndarray | None]) -> bytes:
        """The argument block; every member must be given, and nothing else."""
        names = {field.name for field in self.plan.params}
        if names != set(params):
            raise HostModelError(
                f"params: missing {sorted(names - set(params))}, unknown {sorted(set(params) - names)}"
            )
        block = bytearray(self.plan.params_bytes)
        for field in self.plan.params:
            value = params[field.name]
            if isinstance(value, np.ndarray):
                value = value.ctypes.data
            struct.pack_into("<" + _PACK[field.ctype], block, field.offset_bytes, 0 if value is None else value)
        return bytes(block)


@cache
def _machine() -> ctypes.CDLL:
    """The machine's library; units find its symbols in the global scope."""
    sources = sorted(FOLDER.glob("*.cpp"))
    text = "".join(path.read_text(encoding="utf-8") for path in (*sources, *sorted(FOLDER.glob("*.h"))))
    target = CACHE / f"machine-{_digest(text, _FLAGS)}"
    if not target.is_file():
        CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile([*_FLAGS, "-O3", "-shared", *map(str, sources)], target)
    library = ctypes.CDLL(str(target), ctypes.RTLD_GLOBAL)
    library.host_run.restype = ctypes.c_char_p
    library.host_run.argtypes = (ctypes.POINTER(_Launch),)
    return library


def _compile_unit(text: str, arch: int) -> Path:
    flags = [*_FLAGS, *_BODY_FLAGS, f"-D__CUDA_ARCH__={arch}", f"-I{FOLDER}"]
    target = CACHE / f"unit-{_digest(text + (FOLDER / 'machine.h').read_text(), flags)}"
    if not target.is_file():
        CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile([*flags, "-shared", str(write_source(text, target.with_suffix(".cpp")))], target)
    return target


def write_source(text: str, path: Path) -> Path:
    """Written aside, then renamed: the compiler of another process may be about to read the same path."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)
    return path


def _digest(text: str, flags: list[str]) -> str:
    return hashlib.sha256("\0".join((text, *flags)).encode()).hexdigest()[:16]


def _compile(arguments: list[str], target: Path) -> None:
    """Compile to a name of its own, then rename: processes may share the cache."""
    if COMPILER is None:
        raise HostModelError("g++ not found: the host model needs a C++17 compiler")
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    result = subprocess.run([COMPILER, *arguments, "-o", str(partial)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise HostModelError(f"{' '.join([COMPILER, *arguments])}\n{result.stderr[-4000:]}")
    partial.rename(target)
