"""The CUDA driver as the runtime sees it: one small class, which tests replace by one that records launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

import torch

from dsagen import knobs
from dsagen.errors import DeviceError
from dsagen.runtime.blocks import ArgumentBlock
from dsagen.runtime.native import open_launcher

# CUDA 12.8, the first driver generation (570) whose loader takes what the build makes.
MIN_DRIVER_VERSION = 12080
# What the driver answers when a call is not allowed because a stream is being captured.
CAPTURE_ERRORS = frozenset(
    {
        "CUDA_ERROR_NOT_PERMITTED",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    }
)
NO_BINARY = "CUDA_ERROR_NO_BINARY_FOR_GPU"


class DriverError(DeviceError):
    """A driver call failed; `code` is the driver's name of the error."""

    def __init__(self, what: str, code: str, text: str) -> None:
        super().__init__(f"{what}: {code}: {text}")
        self.code = code
        self._parts = (what, code, text)

    def __reduce__(self) -> tuple[type[DriverError], tuple[str, str, str]]:
        # Without it a worker process could not hand the error back.
        return type(self), self._parts


@dataclass(frozen=True)
class DeviceFacts:
    """What planning and guards read of a device."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_optin_bytes: int


@dataclass(frozen=True)
class KernelAttributes:
    """What the driver says about a loaded kernel; registers and local bytes are per thread."""

    registers: int
    local_bytes: int
    static_smem_bytes: int
    max_threads: int


@dataclass(frozen=True)
class PointerField:
    """A member of the argument block that is an address; `writable` unless it points to const.

    `kept`: what launches before have left there is read.
    """

    name: str
    offset_bytes: int
    writable: bool
    kept: bool = False


@dataclass(frozen=True)
class LaunchConfig:
    """One launch: `grid` CTAs in x, `threads` each, `cluster` of them in one. `overlaps_previous` asks for programmatic
    stream serialisation.

    `pointers` are for a driver that keeps kernels to the memory of their call.
    """

    grid: int
    threads: int
    smem_bytes: int
    stream: int
    overlaps_previous: bool
    pointers: tuple[PointerField, ...] = field(default=(), repr=False, compare=False)
    cluster: int = 1


# The tensors of a call that its argument block may point into. A CUDA device maps all memory and ignores them.
Operands = Sequence[torch.Tensor | None]


class Driver(Protocol):
    """What the runtime needs. Devices are ordinals as torch counts them, streams raw handles, kernels opaque."""

    def device_count(self) -> int: ...  # noqa: D102
    def current_device(self) -> int: ...  # noqa: D102
    def facts(self, ordinal: int) -> DeviceFacts: ...  # noqa: D102
    def ordinal(self, device: torch.device) -> int | None:
        """Ordinal of a torch device with an index, None for a device of another kind."""

    def known_devices(self) -> str:
        """The devices there are, for messages."""

    def wanted_home(self, name: str, device: torch.device) -> str:
        """Where a tensor that lies on `device` has to lie, and how it gets there, for messages."""

    def torch_device(self, ordinal: int) -> torch.device: ...  # noqa: D102
    def load_kernel(self, ordinal: int, code: Any, symbol: str) -> Any: ...  # noqa: D102
    def attributes(self, ordinal: int, kernel: Any) -> KernelAttributes: ...  # noqa: D102
    def allow_dynamic_smem(self, ordinal: int, kernel: Any, smem_bytes: int) -> None: ...  # noqa: D102
    def prefer_shared_memory(self, ordinal: int, kernel: Any) -> None:
        """Ask for multiprocessors that are set to the most shared memory, though the kernel needs none."""

    def current_stream(self, ordinal: int) -> int: ...  # noqa: D102
    def is_capturing(self, ordinal: int) -> bool:
        """Whether the current stream of the device is being captured, or forbids calls because another one is."""

    def capture_id(self, ordinal: int) -> int:
        """A number for the capture that the current stream is in, 0 without one."""

    def allocate(self, ordinal: int, size_bytes: int, zero: bool) -> torch.Tensor:
        """uint8 memory for the current stream that lies outside of every pool and mode of torch that is active."""

    def make_launch(
        self, ordinal: int, kernel: Any, config: LaunchConfig, block: ArgumentBlock
    ) -> Callable[[Operands], None]:
        """A prepared launch of what `block` holds by then, called with a call's operands. It keeps the block."""

    def most_clusters(self, ordinal: int, kernel: Any, config: LaunchConfig) -> int:
        """How many clusters of a launch the device holds at once, 0 where it cannot hold one."""

    def launcher(self) -> Any:
        """The launcher in C on this driver, or None: then launches are made by `make_launch`."""

    def handles(self, ordinal: int, kernel: Any) -> tuple[int, int]:
        """A kernel's function and the context that it runs in, as the launcher takes them."""

    def error_of(self, what: str, code: int) -> DriverError:
        """The error for a code that the driver has given the launcher."""

    def synchronize(self, ordinal: int, stream: int) -> None: ...  # noqa: D102
    def keep_for_stream(self, ordinal: int, tensor: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses a tensor, so that its memory outlives that work."""


class CudaDriver:
    """The real driver, by cuda-python, in the primary contexts that torch uses as well.

    `launcher` overrides DSAGEN_LAUNCHER. Raises DeviceError when there is no driver, no device, a driver that is too
    old, or a torch without CUDA.
    """

    def __init__(self, launcher: str | None = None) -> None:
        self._cuda = _import_driver()
        self._contexts: dict[int, Any] = {}
        self._context_handles: dict[int, int] = {}
        self._lock = threading.Lock()
        _require_torch_cuda()
        self._launcher = open_launcher(launcher)
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def device_count(self) -> int:
        """Devices that CUDA_VISIBLE_DEVICES leaves."""
        return int(self._call("cuDeviceGetCount"))

    def current_device(self) -> int:
        """Torch's current device."""
        return int(torch.cuda.current_device())

    def facts(self, ordinal: int) -> DeviceFacts:
        """Name and limits of a device."""
        device, kind = self._device(ordinal), self._cuda.CUdevice_attribute

        def attribute(name: str) -> int:
            return int(self._call("cuDeviceGetAttribute", getattr(kind, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

        name = self._call("cuDeviceGetName", 256, device)
        return DeviceFacts(
            name=name.split(b"\0")[0].decode(),
            capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            sm_count=attribute("MULTIPROCESSOR_COUNT"),
            smem_optin_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        )

    def ordinal(self, device: torch.device) -> int | None:
        """The index of a CUDA device."""
        return device.index if device.type == "cuda" else None

    def torch_device(self, ordinal: int) -> torch.device:
        """The CUDA device of that index."""
        return torch.device("cuda", ordinal)

    def known_devices(self) -> str:
        """For messages."""
        return f"one of the {self.device_count()} CUDA device(s), such as 0 or 'cuda:0'"

    def wanted_home(self, name: str, device: torch.device) -> str:
        """For messages."""
        return cuda_home(name, device)

    def load_kernel(self, ordinal: int, cubin: bytes, symbol: str) -> Any:
        """The function of a cubin in the device's context. Libraries stay loaded: captured graphs may refer to them."""
        with self._current(ordinal):
            library = self._call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
            # Loading is lazy: a cubin of another arch is refused only here.
            kernel = self._call("cuLibraryGetKernel", library, symbol.encode())
            return _CudaKernel(library, kernel, self._call("cuKernelGetFunction", kernel))

    def attributes(self, ordinal: int, kernel: Any) -> KernelAttributes:
        """Attributes of a loaded kernel on its device."""
        kind, device = self._cuda.CUfunction_attribute, self._device(ordinal)

        def attribute(name: str) -> int:
            return int(
                self._call("cuKernelGetAttribute", getattr(kind, f"CU_FUNC_ATTRIBUTE_{name}"), kernel.kernel, device)
            )

        with self._current(ordinal):
            return KernelAttributes(
                registers=attribute("NUM_REGS"),
                local_bytes=attribute("LOCAL_SIZE_BYTES"),
                static_smem_bytes=attribute("SHARED_SIZE_BYTES"),
                max_threads=attribute("MAX_THREADS_PER_BLOCK"),
            )

    def allow_dynamic_smem(self, ordinal: int, kernel: Any, smem_bytes: int) -> None:
        """Opt in to more dynamic shared memory than the default 48 KiB."""
        kind = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._current(ordinal):
            self._call("cuKernelSetAttribute", kind, smem_bytes, kernel.kernel, self._device(ordinal))

    def prefer_shared_memory(self, ordinal: int, kernel: Any) -> None:
        """Ask for multiprocessors that are set to the most shared memory; a hint, which the driver may not follow."""
        kind = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        with self._current(ordinal):
            self._call("cuKernelSetAttribute", kind, 100, kernel.kernel, self._device(ordinal))

    def current_stream(self, ordinal: int) -> int:
        """Torch's current stream on a device."""
        return int(torch._C._cuda_getCurrentRawStream(ordinal))

    def is_capturing(self, ordinal: int) -> bool:
        """Whether the current stream is being captured; the legacy stream refuses while any other one is."""
        launcher, stream = self._launcher.launcher, self.current_stream(ordinal)
        if launcher is not None:
            status = launcher.capture_status(self._context(ordinal), stream)
            return status > 0 or (status < 0 and self._forbids(self._cuda.CUresult(-status)))
        with self._current(ordinal):
            result, *found = self._cuda.cuStreamIsCapturing(stream)
        if result:
            return self._forbids(result)
        return bool(found[0] != self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def _forbids(self, result: Any) -> bool:
        """Whether an answer says that a capture forbids the question; anything else is raised."""
        if result.name not in CAPTURE_ERRORS:
            _check(self._cuda, "cuStreamIsCapturing", result)
        return True

    def capture_id(self, ordinal: int) -> int:
        """The number of the capture that the current stream is in; -1 where one of another stream forbids to ask."""
        with self._current(ordinal):
            result, *found = self._cuda.cuStreamGetCaptureInfo(self.current_stream(ordinal))
        if result and self._forbids(result):
            return -1
        active = self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(found[1]) if found[0] == active else 0

    def allocate(self, ordinal: int, size_bytes: int, zero: bool) -> torch.Tensor:
        """Memory of torch's allocator, from a thread of its own: what is active in the caller's does not reach it."""
        found: list[torch.Tensor | RuntimeError] = []
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]

        def work() -> None:
            try:
                with torch.cuda.device(ordinal):
                    make = torch.zeros if zero else torch.empty
                    found.append(make(size_bytes, dtype=torch.uint8, device="cuda"))
                    # Whoever had the memory before may not be done with it.
                    ready.record()
            except RuntimeError as error:
                found.append(error)

        thread = threading.Thread(target=work, name="dsagen-allocate")
        thread.start()
        thread.join()
        (result,) = found
        if isinstance(result, RuntimeError):
            raise result
        torch.cuda.current_stream(ordinal).wait_event(ready)
        return result

    def make_launch(
        self, ordinal: int, kernel: Any, config: LaunchConfig, block: ArgumentBlock
    ) -> Callable[[Operands], None]:
        """A prepared cuLaunchKernelEx."""
        launch = self._launch_config(config)
        function, call, params = kernel.function, self._cuda.cuLaunchKernelEx, block.pointers_address

        # The default keeps the memory that the address leads to for as long as somebody may launch.
        def run(_: Operands, _kept: ArgumentBlock = block) -> None:
            with self._current(ordinal):
                (result,) = call(launch, function, params, 0)
            _check(self._cuda, "cuLaunchKernelEx", result)

        return run

    def most_clusters(self, ordinal: int, kernel: Any, config: LaunchConfig) -> int:
        """What the driver reckons from the kernel's resources and the multiprocessors of the context."""
        alone = self._launch_config(replace(config, overlaps_previous=False))
        with self._current(ordinal):
            try:
                return int(self._call("cuOccupancyMaxActiveClusters", kernel.function, alone))
            except DriverError as error:
                if error.code != "CUDA_ERROR_INVALID_CLUSTER_SIZE":
                    raise
                return 0

    def _launch_config(self, config: LaunchConfig) -> Any:
        launch = self._cuda.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = config.grid, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = config.threads, 1, 1
        launch.sharedMemBytes = config.smem_bytes
        launch.hStream = config.stream
        launch.attrs = self._launch_attributes(config)
        launch.numAttrs = len(launch.attrs)
        return launch

    def _launch_attributes(self, config: LaunchConfig) -> list[Any]:
        kinds, attributes = self._cuda.CUlaunchAttributeID, []
        if config.overlaps_previous:
            overlap = self._cuda.CUlaunchAttribute()
            overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        if config.cluster > 1:
            cluster = self._cuda.CUlaunchAttribute()
            cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x = config.cluster
            cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
            attributes.append(cluster)
        return attributes

    def launcher(self) -> Any:
        """The launcher in C, unless DSAGEN_LAUNCHER forbids it or it cannot be compiled."""
        return self._launcher.launcher

    def handles(self, ordinal: int, kernel: Any) -> tuple[int, int]:
        """The function in the device's context, and that context."""
        return int(kernel.function), self._context(ordinal)

    def error_of(self, what: str, code: int) -> DriverError:
        """The error with the driver's own words."""
        return _driver_error(self._cuda, what, self._cuda.CUresult(code))

    def synchronize(self, ordinal: int, stream: int) -> None:
        """Wait for a stream; raises what its work reports."""
        with self._current(ordinal):
            self._call("cuStreamSynchronize", stream)

    def keep_for_stream(self, ordinal: int, tensor: torch.Tensor) -> None:
        """Record the current stream with torch's allocator."""
        tensor.record_stream(torch.cuda.current_stream(ordinal))

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def _current(self, ordinal: int) -> _CurrentContext:
        self._context(ordinal)
        return _CurrentContext(self._cuda, self._contexts[ordinal])

    def _context(self, ordinal: int) -> int:
        """The handle of a device's primary context."""
        found = self._context_handles.get(ordinal)
        if found is None:
            with self._lock:
                context = self._contexts[ordinal] = self._call("cuDevicePrimaryCtxRetain", self._device(ordinal))
                found = self._context_handles[ordinal] = int(context)
        return found

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._cuda, name)(*arguments)
        _check(self._cuda, name, result)
        return values[0] if values else None


@dataclass(frozen=True)
class _CudaKernel:
    """Handles of a loaded kernel: the function is the kernel in one device's context."""

    library: Any
    kernel: Any
    function: Any


class _CurrentContext:
    """Makes a device's context current for one `with`, unless it is already.

    The driver is asked rather than torch, for a thread that has not touched CUDA yet has no context, and torch reports
    device 0 there all the same.
    """

    __slots__ = ("_context", "_cuda", "_pushed")

    def __init__(self, cuda: Any, context: Any) -> None:
        self._cuda, self._context, self._pushed = cuda, context, False

    def __enter__(self) -> None:
        result, current = self._cuda.cuCtxGetCurrent()
        _check(self._cuda, "cuCtxGetCurrent", result)
        if int(current) != int(self._context):
            (result,) = self._cuda.cuCtxPushCurrent(self._context)
            _check(self._cuda, "cuCtxPushCurrent", result)
            self._pushed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pushed:
            result, _ = self._cuda.cuCtxPopCurrent()
            _check(self._cuda, "cuCtxPopCurrent", result)


def cuda_home(name: str, device: torch.device) -> str:
    """Where a tensor of kernels on CUDA devices has to lie."""
    other = ", or load the spec with device='emulator' to run kernels on the CPU" if device.type == "cpu" else ""
    return f"a CUDA device: move it with {name}.to('cuda'){other}"


def _import_driver() -> Any:
    """cuda-python's driver module with the driver initialised."""
    from cuda.bindings import driver as cuda

    visible = knobs.foreign("CUDA_VISIBLE_DEVICES")
    hint = "`dsagen build` needs no GPU; loading and launching do"
    try:
        (result,) = cuda.cuInit(0)
    except RuntimeError as error:
        raise DeviceError(f"no NVIDIA driver found on this machine ({str(error).splitlines()[0]}). {hint}.") from None
    shown = (
        f"CUDA_VISIBLE_DEVICES={visible!r}" if visible else "CUDA_VISIBLE_DEVICES is not set, or empty, which hides all"
    )
    if result:
        raise DeviceError(
            f"an NVIDIA driver but no usable device: {_driver_error(cuda, 'cuInit', result)} ({shown}). {hint}."
        )
    _, version = cuda.cuDriverGetVersion()
    if version < MIN_DRIVER_VERSION:
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}: kernels need 12.8, which "
            "driver 570 and newer have. Update the driver."
        )
    _, count = cuda.cuDeviceGetCount()
    if count < 1:
        raise DeviceError(f"an NVIDIA driver but no device ({shown}). {hint}.")
    return cuda


def _require_torch_cuda() -> None:
    if torch.version.cuda is None:
        raise DeviceError(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch to launch kernels"
        )


def _check(cuda: Any, what: str, result: Any) -> None:
    if result:
        raise _driver_error(cuda, what, result)


def _driver_error(cuda: Any, what: str, result: Any) -> DriverError:
    _, text = cuda.cuGetErrorString(result)
    return DriverError(what, result.name, text.decode() if text else "unknown error")
