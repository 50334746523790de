"""A driver of CPU "devices" that records launches, so that the runtime's whole path runs without a GPU."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field, replace

import torch

from dsagen.runtime.blocks import ArgumentBlock
from dsagen.runtime.driver import DeviceFacts, DriverError, KernelAttributes, LaunchConfig, Operands, cuda_home

# As many registers as plans for this device reckon with.
GOOD = KernelAttributes(registers=128, local_bytes=0, static_smem_bytes=0, max_threads=1024)
H200 = DeviceFacts("fake H200", (9, 0), 132, 227 * 1024)


@dataclass
class Record:
    """One launch: kernel symbol, configuration and the argument block's bytes at that moment."""

    symbol: str
    config: LaunchConfig
    block: bytes


@dataclass
class FakeDriver:
    """One device, the CPU. Tests set the fields to play a device, a stream or a failure."""

    device: DeviceFacts = H200
    stream: int = 0
    capturing: bool = False
    capture: int = 1
    clusters: int = 16
    attributes_of: KernelAttributes = GOOD
    load_error: str = ""
    launch_error: str = ""
    sync_error: str = ""
    launches: list[Record] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    smem_opt_ins: dict[str, int] = field(default_factory=dict)
    smem_preferred: list[str] = field(default_factory=list)
    syncs: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)
    block_bytes: dict[str, int] = field(default_factory=dict)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def facts(self, ordinal: int) -> DeviceFacts:
        return self.device

    def ordinal(self, device: torch.device) -> int | None:
        return 0 if device.type == "cpu" else None

    def torch_device(self, ordinal: int) -> torch.device:
        return torch.device("cpu")

    def known_devices(self) -> str:
        return "one of the 1 CUDA device(s), such as 0 or 'cuda:0'"

    def wanted_home(self, name: str, device: torch.device) -> str:
        return cuda_home(name, device)

    def load_kernel(self, ordinal: int, cubin: bytes, symbol: str) -> str:
        if self.load_error:
            raise DriverError("cuLibraryGetKernel", self.load_error, "refused")
        self.loads.append(symbol)
        self.block_bytes[symbol] = int(cubin)
        return symbol

    def attributes(self, ordinal: int, kernel: str) -> KernelAttributes:
        two_groups = re.fullmatch(
            r"dsa_sparse_decode_main_hopper_.*(_n_(8|16)|_kv_v32(_nope)?_dqk_\d+_dv_512_n_\d+)_.*", kernel
        )
        if two_groups and self.attributes_of.registers == GOOD.registers:
            return replace(self.attributes_of, registers=96)  # those have warps enough for no more
        return self.attributes_of

    def allow_dynamic_smem(self, ordinal: int, kernel: str, smem_bytes: int) -> None:
        self.smem_opt_ins[kernel] = smem_bytes

    def prefer_shared_memory(self, ordinal: int, kernel: str) -> None:
        self.smem_preferred.append(kernel)

    def current_stream(self, ordinal: int) -> int:
        return self.stream

    def is_capturing(self, ordinal: int) -> bool:
        return self.capturing

    def capture_id(self, ordinal: int) -> int:
        return self.capture if self.capturing else 0

    def allocate(self, ordinal: int, size_bytes: int, zero: bool) -> torch.Tensor:
        make = torch.zeros if zero else torch.empty
        return make(size_bytes, dtype=torch.uint8)

    def make_launch(self, ordinal: int, kernel: str, config: LaunchConfig, block: ArgumentBlock):
        def run(operands: Operands) -> None:
            if self.launch_error:
                raise DriverError("cuLaunchKernelEx", self.launch_error, "refused")
            address = ctypes.c_void_p.from_address(block.pointers_address).value
            self.launches.append(Record(kernel, config, ctypes.string_at(address, self.block_bytes[kernel])))

        return run

    def most_clusters(self, ordinal: int, kernel: str, config: LaunchConfig) -> int:
        if config.grid < 1 or config.grid % config.cluster:
            raise DriverError("cuOccupancyMaxActiveClusters", "CUDA_ERROR_INVALID_VALUE", "invalid argument")
        return self.clusters

    def launcher(self):
        return None

    def handles(self, ordinal: int, kernel: str) -> tuple[int, int]:
        raise AssertionError("asked for handles without a launcher")

    def error_of(self, what: str, code: int) -> DriverError:
        raise AssertionError("asked for an error of the launcher")

    def synchronize(self, ordinal: int, stream: int) -> None:
        self.syncs += 1
        if self.sync_error:
            raise DriverError("cuStreamSynchronize", self.sync_error, "an illegal memory access was encountered")

    def keep_for_stream(self, ordinal: int, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)


def fake_cubins(plans):
    """A "cubin" per plan: the size of its argument block, which is all that the fake needs."""
    return {plan.slug: str(plan.params_bytes).encode() for plan in plans}


def unpack(block: bytes, plan) -> dict[str, object]:
    """A recorded block by the plan's own table, field by field."""
    types = {"pointer": ctypes.c_uint64, "u64": ctypes.c_uint64, "i64": ctypes.c_int64, "u32": ctypes.c_uint32,
             "i32": ctypes.c_int32, "f32": ctypes.c_float}  # fmt: skip
    assert len(block) == plan.params_bytes
    return {f.name: types[f.ctype].from_buffer_copy(block, f.offset_bytes).value for f in plan.params}


def take_registers_of_steps(fake: FakeDriver) -> None:
    """As many registers as plans of a step's kernels reckon with, of each stage."""
    usual = fake.attributes
    fake.attributes = lambda ordinal, kernel: (  # type: ignore[method-assign]
        usual(ordinal, kernel) if "sparse_decode" in kernel else replace(GOOD, registers=60)
    )
