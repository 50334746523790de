"""What the methods of every op need of the loaded kernels that they belong to."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from dsagen.matrix import Matrix
from dsagen.runtime.driver import Driver
from dsagen.runtime.loader import Loader
from dsagen.spec import DeploymentSpec

if TYPE_CHECKING:
    from dsagen.runtime.api import Device
    from dsagen.runtime.device_kernels import DeviceKernels


class OpMethods(ABC):
    """A part of `Kernels`: the methods of an op, over what `Kernels` provides."""

    spec: DeploymentSpec
    handle: str
    _matrix: Matrix
    _driver: Driver
    _loader: Loader
    _debug_sync: bool
    _checks_values: bool
    _lock: threading.RLock

    @abstractmethod
    def _require_op(self, op: str) -> None:
        """GuardError for an op that the spec does not declare."""

    @abstractmethod
    def _refuse_capture(self, ordinal: int) -> None:
        """GuardError while a CUDA graph is captured, for what waits for the device."""

    @abstractmethod
    def _on(self, ordinal: int) -> DeviceKernels:
        """The deployment's kernels for a device; DeviceError when its arch is not among them."""

    @abstractmethod
    def _ordinal(self, device: Device | None) -> int:
        """A device's number; the default's for None. DeviceError for a device that there is not."""

    def _home_of(self, tensor: torch.Tensor) -> int:
        """The number of the device that a tensor lies on, which has passed the checks."""
        ordinal = self._driver.ordinal(tensor.device)
        assert ordinal is not None, "a bound tensor lies on a device"
        return ordinal
