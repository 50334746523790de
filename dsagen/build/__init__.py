"""Compiling rendered kernels with nvcc and ninja, and keeping them in the content-addressed store.

Needs neither torch nor a GPU; a hit needs no toolchain either.
"""

from dsagen.build.builder import BuildResult, build_units, write_generated
from dsagen.build.entry import StoreEntry
from dsagen.build.jobs import measure_room
from dsagen.build.progress import BuildProgress, make_progress
from dsagen.build.store import Store
from dsagen.build.toolchain import Toolchain, find_toolchain

__all__ = [
    "BuildProgress",
    "BuildResult",
    "Store",
    "StoreEntry",
    "Toolchain",
    "build_units",
    "find_toolchain",
    "make_progress",
    "measure_room",
    "write_generated",
]
