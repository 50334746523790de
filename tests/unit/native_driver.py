"""The recording driver of fake_driver, with its launches made by the launcher in C on a driver library that records."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from fake_driver import FakeDriver, Record

from dsagen.runtime import native
from dsagen.runtime.driver import DriverError, LaunchConfig

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("cc")
CONTEXT = 0x1000
LAUNCH_FAILED = 719
OVERLAPS, CLUSTER = 6, 4


class _Record(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("attribute_count", ctypes.c_uint),
        ("attributes", (ctypes.c_uint * 4) * 2),
        ("block_bytes", ctypes.c_uint),
        ("bytes", ctypes.c_ubyte * 1024),
    )


@dataclass
class RecordingCuda:
    """The recording library; `launcher` is the launcher in C on it, or one that reads no tensors."""

    library: ctypes.CDLL
    launcher: object
    ints_launcher: object

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def set_handle(self, name: str, value: int) -> None:
        ctypes.c_void_p.in_dll(self.library, name).value = value

    def drain(self) -> list[_Record]:
        records = (_Record * 4096).in_dll(self.library, "stub_records")
        found = [_Record.from_buffer_copy(records[index]) for index in range(self.get("stub_count"))]
        self.set("stub_count", 0)
        return found

    def reset(self) -> None:
        counters = ("stub_count", "stub_pushes")
        for name in (*counters, "stub_fail", "stub_delay_us", "stub_stream_fails", "stub_capturing", "stub_device"):
            self.set(name, 0)
        for name in ("stub_stream", "stub_other_stream", "stub_context", "stub_context_below"):
            self.set_handle(name, 0)


@cache
def recording_cuda() -> RecordingCuda:
    folder = Path(tempfile.mkdtemp(prefix="dsagen-recording-"))
    path = folder / "librecording.so"
    flags = ["-shared", "-fPIC", "-O1", f"-I{native.SOURCES}"]
    subprocess.run([COMPILER, *flags, "-o", path, HERE / "recording_cuda.c"], check=True)
    library = ctypes.CDLL(str(path))
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    library.stub_exchange.restype, library.stub_exchange.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    name = b"dlpack_exchange_api"
    torchs = python.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, name)
    exchange = python.PyCapsule_New(library.stub_exchange(torchs), name, None)
    make = native.load_module().Launcher
    make_like = lambda hollow: torch.empty_like(hollow)  # noqa: E731
    torchs_own = (torch.Tensor, torch.nn.Parameter, make_like, torch.autograd.forward_ad)
    return RecordingCuda(library, make(str(path), exchange, *torchs_own), make(str(path), None, *torchs_own))


class NativeFakeDriver(FakeDriver):
    """As FakeDriver, and held to the same tests."""

    context = CONTEXT
    reads_tensors = True

    def __init__(self, *arguments, **fields):
        self.cuda = recording_cuda()
        self.cuda.reset()
        self._sizes: dict[str, ctypes.c_uint] = {}
        self._recorded: list[Record] = []
        super().__init__(*arguments, **fields)

    @property
    def launches(self) -> list[Record]:
        symbols = {ctypes.addressof(size): symbol for symbol, size in self._sizes.items()}
        for found in self.cuda.drain():
            assert found.context == self.context
            assert (*found.grid[1:], *found.block[1:]) == (1, 1, 1, 1)
            attributes = {row[0]: tuple(row[1:]) for row in found.attributes[: found.attribute_count]}
            config = LaunchConfig(
                found.grid[0],
                found.block[0],
                found.shared_bytes,
                found.stream or 0,
                attributes.get(OVERLAPS, (0,))[0] == 1,
                cluster=attributes.get(CLUSTER, (1,))[0],
            )
            self._recorded.append(Record(symbols[found.function], config, bytes(found.bytes[: found.block_bytes])))
        return self._recorded

    @launches.setter
    def launches(self, value: list[Record]) -> None:
        self._recorded = value

    @property
    def stream(self) -> int:
        return self._stream

    @stream.setter
    def stream(self, value: int) -> None:
        self._stream = value
        self.cuda.set_handle("stub_stream", value)

    @property
    def capturing(self) -> bool:
        return self._capturing

    @capturing.setter
    def capturing(self, value: bool) -> None:
        self._capturing = value
        self.cuda.set("stub_capturing", int(value))

    @property
    def launch_error(self) -> str:
        return self._launch_error

    @launch_error.setter
    def launch_error(self, value: str) -> None:
        self._launch_error = value
        self.cuda.set("stub_fail", LAUNCH_FAILED if value else 0)

    def launcher(self):
        return self.cuda.launcher if self.reads_tensors else self.cuda.ints_launcher

    def handles(self, ordinal: int, kernel: str) -> tuple[int, int]:
        size = self._sizes.setdefault(kernel, ctypes.c_uint(self.block_bytes[kernel]))
        return ctypes.addressof(size), self.context

    def error_of(self, what: str, code: int) -> DriverError:
        assert code == LAUNCH_FAILED
        return DriverError(what, self.launch_error, "refused")


class IntsFakeDriver(NativeFakeDriver):
    """Where torch does not exchange tensors: Python reads them, C launches."""

    reads_tensors = False
