"""Argument blocks and launches: the plan's parameter table becomes bytes, the bytes a launch."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from dsagen.errors import DeviceError, DsagenError
from dsagen.plan import KernelPlan, ParamField
from dsagen.runtime.driver import Driver, DriverError, LaunchConfig, Operands, PointerField
from dsagen.runtime.loader import LoadedKernel

_CODES = {"u8": "B", "u16": "H", "u32": "I", "i32": "i", "f32": "f", "u64": "Q", "i64": "q", "pointer": "Q"}

# Launches kept ready; a serving process has a handful of batch sizes.
_MAX_LAUNCHES = 64

Number = int | float


class ArgumentBlock:
    """The one parameter of a kernel, in memory with a stable address; its layout is the plan's parameter table."""

    def __init__(self, plan: KernelPlan) -> None:
        self._slug = plan.slug
        self.names = tuple(field.name for field in plan.params)
        self._struct = struct.Struct(_format(plan.params, plan.params_bytes))
        self._select: Callable[[Mapping[str, Number]], tuple[Number, ...]] = itemgetter(*self.names)
        self._memory = ctypes.create_string_buffer(plan.params_bytes)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory))

    @property
    def pointers_address(self) -> int:
        """Address of the array of parameter pointers that a launch takes."""
        return ctypes.addressof(self._pointers)

    def write(self, values: Mapping[str, Number]) -> None:
        """Pack every member; names that the block does not have are for other kernels."""
        try:
            self._struct.pack_into(self._memory, 0, *self._select(values))
        except KeyError as error:
            raise DsagenError(f"{self._slug}: nothing gives its parameter {error.args[0]!r}") from None
        except struct.error as error:
            raise DsagenError(f"{self._slug}: an argument does not fit its parameter: {error}: {self.read()}") from None

    def read(self) -> dict[str, Any]:
        """The members as last written."""
        return dict(zip(self.names, self._struct.unpack_from(self._memory), strict=True))


class KernelLaunch:
    """A kernel with its argument block, ready to launch again and again on one stream."""

    def __init__(
        self,
        driver: Driver,
        op: str,
        kernel: LoadedKernel,
        grid: int,
        stream: int,
        block: ArgumentBlock,
        debug_sync: bool,
    ) -> None:
        plan = kernel.plan
        self._driver, self._op, self._kernel = driver, op, kernel
        self._block, self._debug_sync = block, debug_sync
        pointers = tuple(
            PointerField(field.name, field.offset_bytes, not field.target.startswith("const "), field.kept)
            for field in plan.params
            if field.ctype == "pointer"
        )
        self._config = LaunchConfig(grid, plan.threads, plan.smem_bytes, stream, plan.overlaps_previous, pointers)
        self._launch = driver.make_launch(kernel.ordinal, kernel.handle, self._config, block.pointers_address)

    def __call__(self, values: Mapping[str, Number], operands: Operands) -> None:
        """Write the arguments and launch; DeviceError names op, kernel and arguments when the driver refuses.

        `operands` are the tensors that the arguments point into.
        """
        self._block.write(values)
        try:
            self._launch(operands)
            if self._debug_sync:
                self._wait()
        except DriverError as error:
            raise DeviceError(self._failure_text(error)) from None

    def _wait(self) -> None:
        # Nothing runs while a graph is captured, so there is nothing to wait for.
        if not self._driver.is_capturing(self._kernel.ordinal):
            self._driver.synchronize(self._kernel.ordinal, self._config.stream)

    def _failure_text(self, error: DriverError) -> str:
        hint = (
            ""
            if self._debug_sync
            else ". An earlier kernel may be the cause: DSAGEN_DEBUG_SYNC=1 waits after each launch"
        )
        arguments = ", ".join(f"{name}={value}" for name, value in self._block.read().items())
        return (
            f"{self._op}: {self._kernel.plan.slug} failed on device {self._kernel.ordinal}: {error} "
            f"({self._config}; {arguments}){hint}"
        )


class ReadyLaunches:
    """Launches without a plan, kept ready per kernel, device, grid and stream. Safe to use from several threads."""

    def __init__(self, driver: Driver, debug_sync: bool) -> None:
        self._driver, self._debug_sync = driver, debug_sync
        self._launches: OrderedDict[tuple[str, int, int, int], KernelLaunch] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._launches)

    def launch(
        self,
        op: str,
        kernels: Sequence[LoadedKernel],
        grid: int,
        stream: int,
        values: Mapping[str, Number],
        operands: Operands,
    ) -> None:
        """Run an op's kernels one after the other on a stream; `operands` are the tensors of the call and its plan."""
        # The lock covers the launches too: until then the arguments lie in a launch's own block, and another thread's
        # kernel must not come between two that share a workspace.
        with self._lock:
            for kernel in kernels:
                self._ready(op, kernel, grid, stream)(values, operands)

    def _ready(self, op: str, kernel: LoadedKernel, grid: int, stream: int) -> KernelLaunch:
        key = (kernel.plan.slug, kernel.ordinal, grid, stream)
        launch = self._launches.get(key)
        if launch is None:
            block = ArgumentBlock(kernel.plan)
            launch = KernelLaunch(self._driver, op, kernel, grid, stream, block, self._debug_sync)
            self._launches[key] = launch
            if len(self._launches) > _MAX_LAUNCHES:
                self._launches.popitem(last=False)
        self._launches.move_to_end(key)
        return launch


def _format(params: tuple[ParamField, ...], params_bytes: int) -> str:
    """Format string (of struct) for a parameter table, with every gap spelled out."""
    text, end = "<", 0
    for field in params:
        text += f"{field.offset_bytes - end}x{_CODES[field.ctype]}"
        end = field.offset_bytes + field.size_bytes
    return f"{text}{params_bytes - end}x"
