"""Every error that dsagen raises on purpose, and the process exit code that each one maps to.

Exit codes of the command line: 0 success, 2 bad input, 3 failed build, 4 failed check, 5 no usable device.
"""

from __future__ import annotations


class DsagenError(Exception):
    """Base class: an error with a message that is complete for its reader, so no traceback is shown."""

    exit_code = 1


class SpecError(DsagenError, ValueError):
    """A deployment declaration is malformed, contradictory, or asks for what is not built."""

    exit_code = 2


class GuardError(DsagenError, ValueError):
    """A guard refused a plan, a load or a launch; the message starts with the guard's id in brackets."""

    exit_code = 2


class EmulatorLimitError(GuardError):
    """A launch that is larger than the emulator takes."""


class TableError(DsagenError, ValueError):
    """A choice table that cannot be read, or holds what it must not."""

    exit_code = 2


class KnobError(DsagenError, ValueError):
    """An environment knob holds a value that it does not allow."""

    exit_code = 2


class BuildError(DsagenError):
    """A kernel did not compile, or compiled with what the build refuses (spills, C75xx)."""

    exit_code = 3


class ToolchainError(BuildError):
    """No usable nvcc or host compiler, or one that is too old for the requested arch."""


class StoreError(BuildError):
    """The kernel store cannot be read or written as asked."""


class CheckFailed(DsagenError):
    """A conformance run produced wrong numbers."""

    exit_code = 4


class EmulatorError(DsagenError):
    """PTX that the emulator cannot read, a launch that does not fit it, or a kernel that did what it must not."""

    exit_code = 4


class DeviceError(DsagenError):
    """No CUDA device or driver, or a device of another arch than the kernels were built for."""

    exit_code = 5


class FrozenError(DsagenError):
    """A kernel was needed that had not been prepared, after freeze() or during CUDA graph capture."""
