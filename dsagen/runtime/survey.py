"""What CUDA devices this machine has, asked of the driver alone: no context is made, and torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsagen.arch import arch_for_capability
from dsagen.errors import SpecError


@dataclass(frozen=True)
class SurveyedDevice:
    """One device; `arch` is the row it runs, or its compute capability where there is none."""

    index: int
    name: str
    arch: str
    memory_bytes: int


@dataclass(frozen=True)
class DeviceSurvey:
    """The driver's version such as "13.0", None without one, and the devices; `problem` says why there are none."""

    driver: str | None
    devices: tuple[SurveyedDevice, ...]
    problem: str | None


def survey_devices() -> DeviceSurvey:
    """Ask the driver; a machine without one gives a survey with a `problem`, never an error."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return DeviceSurvey(None, (), f"cuda-python cannot be imported ({error})")
    try:
        status, *_ = driver.cuInit(0)
    except RuntimeError as error:
        # cuda.bindings raises this when the driver's library is not there to be loaded.
        return DeviceSurvey(None, (), f"no CUDA driver ({' '.join(str(error).split())})")
    version = _driver_version(driver)
    if int(status) != 0:
        return DeviceSurvey(version, (), f"the CUDA driver has no usable device ({status.name})")
    _, count = driver.cuDeviceGetCount()
    devices = tuple(_describe(driver, index) for index in range(count))
    return DeviceSurvey(version, devices, None if devices else "the CUDA driver shows no device")


def _driver_version(driver: Any) -> str | None:
    status, version = driver.cuDriverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}" if int(status) == 0 else None


def _describe(driver: Any, index: int) -> SurveyedDevice:
    _, device = driver.cuDeviceGet(index)
    _, name = driver.cuDeviceGetName(128, device)
    _, memory_bytes = driver.cuDeviceTotalMem(device)
    attributes = driver.CUdevice_attribute
    _, major = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    _, minor = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    try:
        arch = arch_for_capability(major, minor).name
    except SpecError:
        arch = f"compute capability {major}.{minor}, not built for"
    return SurveyedDevice(index, name.split(b"\0")[0].decode(), arch, int(memory_bytes))
