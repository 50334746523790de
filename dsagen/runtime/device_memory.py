"""Memory that ops and plans make, and what is said where it runs out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from dsagen.errors import DeviceError
from dsagen.runtime.tensors import require_plain

# What the CPU's allocator says, whose error is of no class of its own.
_CPU_WORDS = "DefaultCPUAllocator"


class DeviceMemoryError(DeviceError, torch.OutOfMemoryError):
    """A device's memory ran out. It is torch's error as well, for those who free some and try again."""


def new_output(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised output, raising what `no_memory` gives; GuardError where a mode of torch made something else."""
    try:
        made = torch.empty(tuple(shape), dtype=dtype, device=device)
    except RuntimeError as error:
        size = prod(shape) * dtype.itemsize
        advice = f"call with fewer rows, or pass {name} where the op takes it"
        raise no_memory(name, size, device, advice, error) from None
    # A mode of torch that is active makes something else of it.
    require_plain(name, made)
    return made


def no_memory(name: str, needed_bytes: int, device: torch.device, advice: str, error: RuntimeError) -> DeviceError:
    """What to raise for a failed allocation: DeviceMemoryError, or DeviceError where it was not for want of memory."""
    said = str(error)
    ran_out = isinstance(error, torch.OutOfMemoryError) or _CPU_WORDS in said
    text = f"{name}: {needed_bytes} B cannot be had on {device}: {advice} ({said.splitlines()[0]})"
    return DeviceMemoryError(text) if ran_out else DeviceError(text)
