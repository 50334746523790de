"""What a PTX text declares of a kernel, as a driver tells it of a loaded one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from dsagen.emulator.ptx import parse
from dsagen.errors import EmulatorError

# What a block may have where the text sets no limit.
_MOST_THREADS = 1024


@dataclass(frozen=True)
class PtxAttributes:
    """Bytes of a kernel's argument block, of its static shared memory, and of local memory per thread; most threads."""

    param_bytes: int
    static_shared_bytes: int
    local_bytes: int
    max_threads: int


@lru_cache(maxsize=128)
def attributes(ptx: str, entry: str) -> PtxAttributes:
    """The attributes of kernel `entry`. EmulatorError for PTX that does not parse or has no such kernel."""
    module = parse(ptx)
    kernel = module.kernels.get(entry)
    if kernel is None:
        raise EmulatorError(f"there is no kernel {entry!r} in the PTX; it has {', '.join(module.kernels) or 'none'}")
    variables = [item for item in (*module.variables, *kernel.variables) if not item.dynamic]

    def bytes_in(space: str) -> int:
        return sum(variable.size_bytes for variable in variables if variable.space == space)

    return PtxAttributes(kernel.param_bytes, bytes_in("shared"), bytes_in("local"), _most_threads(ptx, entry))


def _most_threads(ptx: str, entry: str) -> int:
    header = re.search(rf"\.entry\s+{re.escape(entry)}\b[^{{]*", ptx)
    limit = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", header[0] if header else "")
    if limit is None:
        return _MOST_THREADS
    threads = 1
    for extent in limit.groups():
        threads *= int(extent or 1)
    return threads
