"""Global memory of a launch: named buffers at made-up 64-bit addresses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

from dsagen.errors import EmulatorError

_FIRST = 0x10_0000_0000
_GAP = 1 << 20
_LAST = 0x6F00_0000_0000


@dataclass(frozen=True)
class Buffer:
    """Registered bytes. `after_wait`: the grid before writes them, so a kernel may touch them past its wait only.

    `valid` has a byte for each byte, 0 until a kernel has written it; None where all hold values from the start.
    """

    name: str
    address: int
    size_bytes: int
    host: int
    writable: bool
    after_wait: bool
    keep: object
    valid: ctypes.Array[ctypes.c_char] | None

    @property
    def valid_host(self) -> int | None:
        """Host address of `valid`."""
        return None if self.valid is None else ctypes.addressof(self.valid)


class Memory:
    """The buffers that kernels may touch; everything else is out of bounds.

    Addresses have nothing to do with the host's. Neighbours lie a megabyte apart, and an address may be chosen: a small
    array can stand for a window of a pool of many gigabytes.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._next = _FIRST

    def add(
        self,
        name: str,
        array: Any,
        *,
        writable: bool = True,
        address: int | None = None,
        after_wait: bool = False,
        initialised: bool = True,
    ) -> int:
        """Register a contiguous numpy array or CPU torch tensor; returns the device address of its first element.

        The kernel reads and writes the array itself. Of a buffer that is not `initialised`, an output or a workspace,
        it may read only what it, or an earlier launch with this memory, has written. EmulatorError for an array that is
        not contiguous, is not on the CPU or cannot be written, and for an address that another buffer covers.
        """
        host, size = _location(name, array, writable)
        begin = self._next if address is None else address
        if begin < 256 or begin + size > _LAST:
            raise EmulatorError(f"buffer {name}: address {begin:#x} is outside of {256:#x} to {_LAST:#x}")
        for other in self.buffers:
            if begin < other.address + other.size_bytes and other.address < begin + size:
                raise EmulatorError(f"buffer {name}: {begin:#x} lies inside of buffer {other.name}")
        valid = None if initialised else ctypes.create_string_buffer(max(size, 1))
        self.buffers.append(Buffer(name, begin, size, host, writable, after_wait, array, valid))
        self._next = max(self._next, (begin + size + 2 * _GAP - 1) // _GAP * _GAP)
        return begin

    def after(self, *names: str) -> Memory:
        """The same buffers as the next grid finds them: those named were written by the grid before.

        A kernel may touch them past its griddepcontrol.wait only.
        """
        out = Memory()
        out._next = self._next
        out.buffers = [replace(buffer, after_wait=buffer.name in names) for buffer in self.buffers]
        for name in names:
            out.address(name)
        return out

    def address(self, name: str) -> int:
        """Device address of a registered buffer."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer.address
        raise EmulatorError(f"no buffer {name!r}; there are {', '.join(b.name for b in self.buffers) or 'none'}")


def _location(name: str, array: Any, writable: bool) -> tuple[int, int]:
    """Host address and size in bytes."""
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise EmulatorError(f"buffer {name}: on {array.device}, the emulator needs CPU tensors: use .cpu()")
        if not array.is_contiguous():
            raise EmulatorError(f"buffer {name}: the tensor is not contiguous; register its base")
        return int(array.data_ptr()), int(array.numel() * array.element_size())
    if not hasattr(array, "ctypes"):
        raise EmulatorError(f"buffer {name}: {type(array).__name__} is neither a numpy array nor a torch tensor")
    if not array.flags.c_contiguous:
        raise EmulatorError(f"buffer {name}: the array is not contiguous; register its base")
    if writable and not array.flags.writeable:
        raise EmulatorError(f"buffer {name}: the array is read-only; register it with writable=False")
    return int(array.ctypes.data), int(array.nbytes)
