"""Cases on a CUDA device, by the driver alone: torch would take seconds of each child's start."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from calibration import maps
from calibration.case import Case
from dsagen.errors import DeviceError


class Arguments:
    """A launch's parameters, and the array of pointers to them that the driver takes. Keep it until it has run."""

    def __init__(self, addresses: Sequence[int], tensor_map: bytes = b"") -> None:
        values = [*([tensor_map] if tensor_map else []), *(struct.pack("<Q", address) for address in addresses)]
        self._kept = [ctypes.create_string_buffer(value, len(value)) for value in values]
        self._pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(buffer) for buffer in self._kept))
        self.address = ctypes.addressof(self._pointers)


class Device:
    """One CUDA device, whose primary context is this thread's; `cuda` is the module cuda.bindings.driver."""

    def __init__(self, ordinal: int, cuda: Any) -> None:
        self._cuda = cuda
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        # Without a current context not even a tensor map is encoded.
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", self._device))

    @staticmethod
    def open(ordinal: int) -> Device:
        from cuda.bindings import driver

        return Device(ordinal, driver)

    def about(self) -> dict[str, str]:
        name = self._call("cuDeviceGetName", 256, self._device)
        return {"device": name.split(b"\0")[0].decode()}

    def maps(self) -> dict[str, dict[str, Any]]:
        return maps.survey(ctypes.CDLL("libcuda.so.1"), self._cuda)

    def run(self, case: Case, cubin: bytes) -> np.ndarray:
        """The output; DeviceError with the driver's name for whatever else it answers."""
        arrays = case.arrays()
        library = self._call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
        kernel = self._call("cuKernelGetFunction", self._call("cuLibraryGetKernel", library, b"k"))
        places = [self._call("cuMemAlloc", array.nbytes) for array in arrays]
        for place, array in zip(places, arrays, strict=True):
            self._call("cuMemcpyHtoD", place, array.ctypes.data, array.nbytes)
        self._launch(case, kernel, [int(place) for place in places])
        self._call("cuCtxSynchronize")
        out = arrays[-1]
        self._call("cuMemcpyDtoH", out.ctypes.data, places[-1], out.nbytes)
        for place in places:
            self._call("cuMemFree", place)
        self._call("cuLibraryUnload", library)
        return out

    def _launch(self, case: Case, kernel: Any, addresses: list[int]) -> None:
        tensor_map = case.tensor_map(addresses)
        arguments = Arguments(addresses, b"" if tensor_map is None else tensor_map.encode(self._cuda))
        launch = self._cuda.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = case.grid, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = case.threads, 1, 1
        if case.cluster > 1:
            cluster = self._cuda.CUlaunchAttribute()
            cluster.id = self._cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x = case.cluster
            cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
            launch.attrs, launch.numAttrs = [cluster], 1
        # The driver has copied the arguments when it returns.
        self._call("cuLaunchKernelEx", launch, kernel, arguments.address, 0)

    def is_usable(self) -> bool:
        """Whether anything can still run; after some faults nothing can in this process."""
        result, *_ = self._cuda.cuCtxSynchronize()
        return int(result) == 0

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._cuda, name)(*arguments)
        if int(result) != 0:
            raise DeviceError(f"{name}: {result.name}")
        return values[0] if values else None


class Emulated:
    """The emulator in the place of a device, which has no use for cubins."""

    def about(self) -> dict[str, str]:
        return {"device": "emulator"}

    def maps(self) -> dict[str, dict[str, Any]]:
        return {}

    def run(self, case: Case, cubin: bytes) -> np.ndarray:
        return case.run_emulated()

    def is_usable(self) -> bool:
        return True
