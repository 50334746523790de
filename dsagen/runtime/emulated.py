"""The emulator as a device: what `dsagen.load(spec, device="emulator")` launches on, with CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch

from dsagen import emulator, knobs
from dsagen.arch import ARCHS, H200, Arch
from dsagen.build import StoreEntry, measure_room
from dsagen.build.compile import PTX
from dsagen.emulator import Counts, Memory
from dsagen.emulator.attributes import PtxAttributes, attributes
from dsagen.emulator.library import load_library
from dsagen.errors import DeviceError, EmulatorLimitError, GuardError
from dsagen.guard import require_bool, require_int
from dsagen.occupancy import assumed_at_once
from dsagen.plan import KernelPlan
from dsagen.runtime.blocks import ArgumentBlock
from dsagen.runtime.driver import (
    DeviceFacts,
    DriverError,
    KernelAttributes,
    LaunchConfig,
    Operands,
    PointerField,
)
from dsagen.runtime.loader import code_of_entries
from dsagen.runtime.tensors import span_bytes

DEVICE = emulator.DEVICE
_MOST_SEED = (1 << 63) - 1
# Where nothing lies: what a pointer becomes that leads into no tensor of the call, such as that of an empty one.
_NOWHERE = 1
# Operands lie apart, so that what runs past one does not end in another. Within this many bytes they keep the alignment
# that they have on the host, whose allocator gives at least that.
_FIRST_ADDRESS, _GAP_BYTES, _ALIGNMENT_BYTES = 1 << 36, 1 << 24, 64


@dataclass(frozen=True)
class EmulatedLaunch:
    """One launch that went well: the kernel's symbol, its grid, and what it did."""

    symbol: str
    grid: int
    counts: Counts


@dataclass(frozen=True)
class EmulatorOptions:
    """How kernels run on the emulator; what is None comes from DSAGEN_EMULATOR_SEED, _RACES and _THREADS.

    `seed` 0 runs warps in turn, any other draws their order; `races` looks for unordered accesses; `threads` are those
    of the host. `counters` measures each launch in detail, `observe` is called with every launch that went well.
    GuardError for a number outside its range and a value of another type.
    """

    seed: int | None = None
    races: bool | None = None
    threads: int | None = None
    counters: bool = False
    observe: Callable[[EmulatedLaunch], None] | None = None

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("seed", self.seed, 0, _MOST_SEED),
            ("threads", self.threads, 1, knobs.MOST_HOST_THREADS),
        ):
            if value is not None and not least <= require_int(name, value) <= most:
                raise GuardError(f"[T-12] {name}: {value}, expected {least} to {most} for the emulator")
        if self.races is not None:
            require_bool("races", self.races)
        require_bool("counters", self.counters)
        if self.observe is not None and not callable(self.observe):
            raise GuardError(f"[T-12] observe: expected a function of an EmulatedLaunch, found {self.observe!r:.200}")


@dataclass(frozen=True)
class EmulatedCode:
    """What the emulator loads: a kernel's PTX, and the registers that ptxas gave to the cubin made of it."""

    ptx: str
    registers: int


def read_ptx(plans: Sequence[KernelPlan]) -> dict[str, EmulatedCode]:
    """Code by slug, compiling what the store lacks; with DSAGEN_NO_JIT a miss is a StoreError."""
    return code_of_entries(plans, code_of)


def code_of(entry: StoreEntry) -> EmulatedCode:
    """The code of a store entry, verified: BrokenEntryError where it has changed."""
    return EmulatedCode(entry.read(PTX).decode(), int(entry.report["registers"]))


@dataclass(frozen=True)
class _Kernel:
    code: EmulatedCode
    symbol: str
    found: PtxAttributes


@dataclass
class EmulatorDriver:
    """One device, ordinal 0, whose memory is the host's; it runs at once, on one stream.

    It stands for `arch` with the SM count of a product: the one measured for that arch, an H200 where there is none.
    SM counts decide partitions only. ToolchainError where no g++ compiles the machine,
    StoreError where it cannot be kept.
    """

    arch: Arch
    options: EmulatorOptions = field(default_factory=EmulatorOptions)

    def __post_init__(self) -> None:
        load_library()
        given = self.options
        self.seed = knobs.EMULATOR_SEED.get() if given.seed is None else given.seed
        self.races = knobs.EMULATOR_RACES.get() if given.races is None else given.races
        chosen = given.threads or knobs.EMULATOR_THREADS.get()
        self.threads = measure_room().cores if chosen is None else chosen
        self._most_ctas = knobs.EMULATOR_MOST_CTAS.get()
        # What the grid before may still be writing, for one that overlaps it.
        self._written: tuple[range, ...] = ()

    def device_count(self) -> int:
        """One."""
        return 1

    def current_device(self) -> int:
        """The one."""
        return 0

    def facts(self, ordinal: int) -> DeviceFacts:
        """The arch's limits and a product's SM count, which the name tells."""
        product = self.arch.figures[0] if self.arch.figures else H200
        name = f"emulator with the SM count of an {product.device}"
        return DeviceFacts(name, self.arch.compute_capability, product.sm_count, self.arch.smem_optin_bytes)

    def ordinal(self, device: torch.device) -> int | None:
        """0 for the CPU."""
        return 0 if device.type == "cpu" else None

    def torch_device(self, ordinal: int) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def known_devices(self) -> str:
        """For messages."""
        return f"{DEVICE!r}, for which these kernels were loaded"

    def wanted_home(self, name: str, device: torch.device) -> str:
        """Where tensors have to lie, and how they get there."""
        return (
            f"the CPU, since these kernels were loaded with device={DEVICE!r}: move it with {name}.cpu(), or load the "
            "spec for a CUDA device"
        )

    def load_kernel(self, ordinal: int, code: EmulatedCode, symbol: str) -> _Kernel:
        """The kernel of that name, parsed. EmulatorError for PTX that does not parse or lacks it."""
        return _Kernel(code, symbol, attributes(code.ptx, symbol))

    def attributes(self, ordinal: int, kernel: _Kernel) -> KernelAttributes:
        """What the PTX declares, and the cubin's registers: the emulator itself has any number."""
        found = kernel.found
        return KernelAttributes(
            registers=kernel.code.registers,
            local_bytes=found.local_bytes,
            static_smem_bytes=found.static_shared_bytes,
            max_threads=found.max_threads,
        )

    def allow_dynamic_smem(self, ordinal: int, kernel: _Kernel, smem_bytes: int) -> None:
        """Nothing: a launch gets what it asks for, and the loader has held that to the arch's limit."""

    def prefer_shared_memory(self, ordinal: int, kernel: _Kernel) -> None:
        """Nothing: there are no multiprocessors to set."""

    def current_stream(self, ordinal: int) -> int:
        """The one stream."""
        return 0

    def is_capturing(self, ordinal: int) -> bool:
        """Never: there are no graphs here."""
        return False

    def capture_id(self, ordinal: int) -> int:
        """None: there are no graphs here."""
        return 0

    def allocate(self, ordinal: int, size_bytes: int, zero: bool) -> torch.Tensor:
        """Memory of the host."""
        make = torch.zeros if zero else torch.empty
        return make(size_bytes, dtype=torch.uint8)

    def make_launch(
        self, ordinal: int, kernel: _Kernel, config: LaunchConfig, block: ArgumentBlock
    ) -> Callable[[Operands], None]:
        """A prepared launch; EmulatorLimitError when the grid is larger than DSAGEN_EMULATOR_MOST_CTAS."""

        def run(operands: Operands) -> None:
            if config.grid > self._most_ctas:
                raise EmulatorLimitError(
                    f"[T-18] grid: {kernel.symbol} would run {config.grid} CTAs, the emulator's limit is "
                    f"{self._most_ctas}: pass a smaller batch, or raise {knobs.EMULATOR_MOST_CTAS.name} and wait longer"
                )
            address = ctypes.c_void_p.from_address(block.pointers_address).value
            assert address is not None
            arguments = bytearray(ctypes.string_at(address, kernel.found.param_bytes))
            hidden = self._written if config.overlaps_previous else ()
            memory, written = bind_memory(arguments, config.pointers, operands, hidden)
            # Set first, since a launch that fails half way has written as well.
            self._written = written
            counts = emulator.launch(
                kernel.code.ptx,
                kernel.symbol,
                config.grid,
                config.threads,
                bytes(arguments),
                config.smem_bytes,
                memory,
                seed=self.seed,
                os_threads=self.threads,
                cluster=config.cluster if config.cluster > 1 else None,
                races=self.races,
                counters=self.options.counters,
            )
            if self.options.observe is not None:
                self.options.observe(EmulatedLaunch(kernel.symbol, config.grid, counts))

        return run

    def most_clusters(self, ordinal: int, kernel: _Kernel, config: LaunchConfig) -> int:
        """As many as a device with that SM count is assumed to hold, so that choices are those of `dsagen explain`.

        Here CTAs of a cluster are resident together in any case. DriverError for a grid of no whole clusters, or none.
        """
        if config.grid < 1 or config.grid % config.cluster:
            raise DriverError("cuOccupancyMaxActiveClusters", "CUDA_ERROR_INVALID_VALUE", "invalid argument")
        return assumed_at_once(self.facts(ordinal).sm_count, config.cluster)

    def launcher(self) -> None:
        """None: there is no CUDA driver to launch on."""

    def handles(self, ordinal: int, kernel: _Kernel) -> tuple[int, int]:
        """Never asked for, without a launcher."""
        raise DeviceError(f"{kernel.symbol}: the emulator has no handles of a CUDA driver")

    def error_of(self, what: str, code: int) -> DriverError:
        """Never asked for, without a launcher."""
        return DriverError(what, str(code), "no error of the emulator")

    def synchronize(self, ordinal: int, stream: int) -> None:
        """Nothing: launches have ended when they return."""

    def keep_for_stream(self, ordinal: int, tensor: torch.Tensor) -> None:
        """Nothing: no work outlives its call."""


def require_known_device(device: object) -> None:
    """Refuse what names neither the emulator nor a device of CUDA, whether or not there is one: GuardError."""
    if device is None or (isinstance(device, str) and device == DEVICE) or _is_ordinal(device):
        return
    named = ""
    if isinstance(device, str | torch.device):
        with contextlib.suppress(RuntimeError):
            named = torch.device(device).type
    if named != "cuda":
        shown = repr(str(device) if isinstance(device, torch.device) else device)
        hint = f" (did you mean {DEVICE!r}?)" if get_close_matches(str(device), [DEVICE]) else ""
        raise GuardError(
            f"[T-12] device {shown:.200}{hint}: expected a CUDA device such as 0 or 'cuda:0', or {DEVICE!r}, which "
            "runs kernels on CPU tensors"
        )


def _is_ordinal(device: object) -> bool:
    return isinstance(device, int) and not isinstance(device, bool) and device >= 0


def require_options(emulator: object) -> None:
    """Refuse what is neither EmulatorOptions nor None: GuardError."""
    if emulator is not None and not isinstance(emulator, EmulatorOptions):
        raise GuardError(
            f"[T-12] emulator: expected options, found {emulator!r:.200} ({type(emulator).__name__}): pass "
            "dsagen.EmulatorOptions, such as dsagen.EmulatorOptions(seed=3)"
        )


def emulated_arch(archs: Sequence[str]) -> Arch:
    """The arch that the emulator stands for: the first of a spec's."""
    return ARCHS[archs[0]]


def bind_memory(
    block: bytearray, pointers: Sequence[PointerField], operands: Operands, hidden: Sequence[range]
) -> tuple[Memory, tuple[range, ...]]:
    """Register the operands that the block's pointers lead into, and put the emulator's addresses in their place.

    A kernel may touch an operand from its first to its last element, and write it where a pointer that is not const
    leads into it; unless that pointer's memory is kept, it may read there only what it has written. Memory of the host
    ranges `hidden` is out of reach until the kernel has waited for the grid before.
    Also returns the host ranges that the kernel may write.
    """
    spans = [(tensor.data_ptr(), span_bytes(tensor), tensor) for tensor in operands if tensor is not None]
    users: dict[tuple[int, int], list[tuple[PointerField, int]]] = {}
    owners: dict[tuple[int, int], torch.Tensor] = {}
    for pointer in pointers:
        (value,) = struct.unpack_from("<Q", block, pointer.offset_bytes)
        holders = [(first, size, tensor) for first, size, tensor in spans if first <= value < first + size]
        if value and not holders:
            struct.pack_into("<Q", block, pointer.offset_bytes, _NOWHERE)
        if holders:
            # Of several the one that begins there: two operands may share memory that is only read.
            first, size, tensor = max(holders, key=lambda holder: (holder[0], holder[1]))
            owners[first, size] = tensor
            users.setdefault((first, size), []).append((pointer, value - first))
    memory, written, free = Memory(), [], _FIRST_ADDRESS
    for (first, size), fields in users.items():
        host = range(first, first + size)
        writable = any(pointer.writable for pointer, _ in fields)
        names = " and ".join(pointer.name for pointer, _ in fields)
        base = memory.add(
            names,
            _bytes_of(owners[first, size], size),
            writable=writable,
            address=free + first % _ALIGNMENT_BYTES,
            initialised=not writable or any(pointer.kept for pointer, _ in fields),
            after_wait=any(host.start < other.stop and other.start < host.stop for other in hidden),
        )
        free = (base + size + 2 * _GAP_BYTES - 1) // _GAP_BYTES * _GAP_BYTES
        for pointer, offset in fields:
            struct.pack_into("<Q", block, pointer.offset_bytes, base + offset)
        if writable:
            written.append(host)
    return memory, tuple(written)


def _bytes_of(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """The memory from a tensor's first element on, gaps between its elements included, as uint8."""
    first = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole[first : first + size_bytes]
