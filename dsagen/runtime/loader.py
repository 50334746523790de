"""From plans to functions on a device: compile what is missing, load, and hold what was loaded to its plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dsagen import knobs
from dsagen.arch import Arch, arch_for_capability
from dsagen.build import Store, StoreEntry, build_units
from dsagen.build.compile import CUBIN
from dsagen.build.entry import BrokenEntryError
from dsagen.errors import DeviceError, FrozenError, SpecError, StoreError
from dsagen.guard import check
from dsagen.limits import LOAD_GUARDS
from dsagen.plan import KernelPlan
from dsagen.render import RenderedUnit, render
from dsagen.runtime.driver import CAPTURE_ERRORS, NO_BINARY, DeviceFacts, Driver, DriverError

T = TypeVar("T")

# Look-ups of entries that change while they are read.
_MOST_LOOKS = 3

# What a driver loads, by slug: cubins, or what else it runs.
ReadCode = Callable[[Sequence[KernelPlan]], Mapping[str, Any]]


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device, checked against its plan."""

    plan: KernelPlan
    ordinal: int
    handle: Any


def read_cubins(plans: Sequence[KernelPlan]) -> dict[str, bytes]:
    """Cubin by slug, compiling what the store lacks; with DSAGEN_NO_JIT a miss is a StoreError."""
    return code_of_entries(plans, lambda entry: entry.read(CUBIN))


def code_of_entries(plans: Sequence[KernelPlan], take: Callable[[StoreEntry], T]) -> dict[str, T]:
    """What `take` reads of each plan's store entry, by slug, verified.

    An entry may be replaced between its look-up and its reading, by a forced build: then it is looked up once more.
    """
    for _ in range(_MOST_LOOKS):
        try:
            return {slug: take(entry) for slug, entry in entries_of(plans).items()}
        except BrokenEntryError as error:
            problem = error
    raise StoreError(f"entries of the kernel store change while they are read ({problem}): what else writes there?")


def entries_of(plans: Sequence[KernelPlan]) -> dict[str, StoreEntry]:
    """Store entry by slug, compiling what the store lacks; with DSAGEN_NO_JIT a miss is a StoreError."""
    units = [render(plan) for plan in plans]
    store = Store.open()
    if not knobs.NO_JIT.get():
        return {result.entry.slug: result.entry for result in build_units(units, store)}
    return {unit.slug: _existing(store, unit) for unit in units}


def _existing(store: Store, unit: RenderedUnit) -> StoreEntry:
    found = store.examine(unit, None)
    if found.entry is None:
        roots = ", ".join(str(root) for root in store.roots)
        raise StoreError(
            f"{unit.slug} is not in the kernel store ({roots}: {found.reason}), and DSAGEN_NO_JIT forbids to compile "
            "it now: run `dsagen build` for this spec, or point DSAGEN_CACHE_DIR to a store that has it"
        )
    return found.entry


def device_arch(facts: DeviceFacts, ordinal: int, spec_name: str, declared: Sequence[str]) -> Arch:
    """The declared arch that runs on a device; DeviceError that names both sides otherwise."""
    major, minor = facts.capability
    try:
        found = arch_for_capability(major, minor)
    except SpecError as error:
        raise DeviceError(f"device {ordinal} ({facts.name}): {error}") from None
    if found.name not in declared:
        raise DeviceError(
            f"{spec_name} is for {', '.join(declared)}, device {ordinal} ({facts.name}) is {found.name}: add "
            f"{found.name} to `archs` in the spec, or choose another device"
        )
    return found


class Loader:
    """Loaded kernels by variant and device. Safe to use from several threads; nothing is ever unloaded."""

    def __init__(self, driver: Driver, read: ReadCode = read_cubins) -> None:
        self._driver, self._read = driver, read
        self._code: dict[str, Any] = {}
        self._loaded: dict[tuple[str, int], LoadedKernel] = {}
        self._lock = threading.RLock()
        self._frozen = False

    @property
    def frozen(self) -> bool:
        """Whether misses are errors."""
        return self._frozen

    def freeze(self) -> None:
        """From now on a kernel that is not loaded yet is a FrozenError."""
        self._frozen = True

    def fetch(self, plans: Sequence[KernelPlan]) -> None:
        """Have the code of these plans at hand, compiling what is missing."""
        with self._lock:
            missing = [plan for plan in plans if plan.slug not in self._code]
            if missing:
                self._refuse_when_frozen(missing[0], "compiled")
                self._code |= self._read(missing)

    def load(self, plan: KernelPlan, ordinal: int) -> LoadedKernel:
        """The kernel on that device.

        Loads it at first use; FrozenError when that is forbidden (after freeze(), or while a CUDA graph is captured),
        GuardError when it is not what its plan says, DeviceError when the device cannot run it.
        """
        found = self._loaded.get((plan.slug, ordinal))
        if found is not None:
            return found
        with self._lock:
            found = self._loaded.get((plan.slug, ordinal))
            if found is None:
                self._refuse_when_frozen(plan, f"loaded on device {ordinal}")
                if self._driver.is_capturing(ordinal):
                    raise FrozenError(_capture_text(plan, ordinal))
                self.fetch([plan])
                found = self._loaded[plan.slug, ordinal] = self._load(plan, ordinal)
            return found

    def _refuse_when_frozen(self, plan: KernelPlan, what: str) -> None:
        if self._frozen:
            raise FrozenError(
                f"{plan.slug} is needed but was not {what} before freeze(): call prepare() for every device first"
            )

    def _load(self, plan: KernelPlan, ordinal: int) -> LoadedKernel:
        facts = self._driver.facts(ordinal)
        try:
            handle = self._driver.load_kernel(ordinal, self._code[plan.slug], plan.symbol)
        except DriverError as error:
            if error.code in CAPTURE_ERRORS:
                raise FrozenError(_capture_text(plan, ordinal)) from None
            if error.code == NO_BINARY:
                major, minor = facts.capability
                raise DeviceError(
                    f"{plan.slug} is built for {plan.variant.arch}, device {ordinal} ({facts.name}) has compute "
                    f"capability {major}.{minor}: load the spec for this device's arch"
                ) from None
            raise DeviceError(f"{plan.slug} cannot be loaded on device {ordinal} ({facts.name}): {error}") from None
        found = self._driver.attributes(ordinal, handle)
        values = {
            "registers": found.registers,
            "registers_cap": plan.registers_cap,
            "moves_registers": plan.moves_registers,
            "local_bytes": found.local_bytes,
            "threads": plan.threads,
            "max_threads": found.max_threads,
            "static_smem_bytes": found.static_smem_bytes,
            "smem_bytes": plan.smem_bytes,
            "device_smem_bytes": facts.smem_optin_bytes,
        }
        check(LOAD_GUARDS, values, plan.slug)
        if plan.smem_bytes:
            self._driver.allow_dynamic_smem(ordinal, handle, plan.smem_bytes)
        elif plan.overlaps_previous:
            # It comes between kernels that fill shared memory. To divide its L1 anew a multiprocessor has to be idle.
            # Not measured.
            self._driver.prefer_shared_memory(ordinal, handle)
        return LoadedKernel(plan, ordinal, handle)


def _capture_text(plan: KernelPlan, ordinal: int) -> str:
    return (
        f"{plan.slug} is not loaded on device {ordinal} yet, and loading during CUDA graph capture is not possible: "
        "call prepare() before the capture"
    )
