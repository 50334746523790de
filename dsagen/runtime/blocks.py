"""Argument blocks: the plan's parameter table becomes bytes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from dsagen.errors import DsagenError
from dsagen.plan import KernelPlan, ParamField

_CODES = {"u8": "B", "u16": "H", "u32": "I", "i32": "i", "f32": "f", "u64": "Q", "i64": "q", "pointer": "Q"}

Number = int | float


class BlockLayout:
    """How the one parameter of a kernel is packed; names that it does not have are for other kernels."""

    def __init__(self, plan: KernelPlan) -> None:
        self._slug = plan.slug
        self.names = tuple(field.name for field in plan.params)
        self.struct = struct.Struct(_format(plan.params, plan.params_bytes))
        self._select: Callable[[Mapping[str, Number]], tuple[Number, ...]] = itemgetter(*self.names)

    def pack_into(self, memory: Any, values: Mapping[str, Number]) -> None:
        """Pack every member; DsagenError for one that nothing gives or that does not fit."""
        try:
            self.struct.pack_into(memory, 0, *self._select(values))
        except KeyError as error:
            raise DsagenError(f"{self._slug}: nothing gives its parameter {error.args[0]!r}") from None
        except struct.error as error:
            found = {name: values[name] for name in self.names}
            raise DsagenError(f"{self._slug}: an argument does not fit its parameter: {error}: {found}") from None

    def pack(self, values: Mapping[str, Number]) -> bytes:
        """The block's bytes."""
        memory = bytearray(self.struct.size)
        self.pack_into(memory, values)
        return bytes(memory)

    def unpack(self, block: Any) -> dict[str, Any]:
        """The members of a block."""
        return dict(zip(self.names, self.struct.unpack_from(block), strict=True))


class ArgumentBlock:
    """The one parameter of a kernel, in memory with a stable address; its layout is the plan's parameter table."""

    def __init__(self, plan: KernelPlan) -> None:
        self._layout = BlockLayout(plan)
        self.names = self._layout.names
        self._memory = ctypes.create_string_buffer(plan.params_bytes)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory))

    @property
    def pointers_address(self) -> int:
        """Address of the array of parameter pointers that a launch takes."""
        return ctypes.addressof(self._pointers)

    def write(self, values: Mapping[str, Number]) -> None:
        """Pack every member."""
        self._layout.pack_into(self._memory, values)

    def read(self) -> dict[str, Any]:
        """The members as last written."""
        return self._layout.unpack(self._memory)


def _format(params: tuple[ParamField, ...], params_bytes: int) -> str:
    """Format string (of struct) for a parameter table, with every gap spelled out."""
    text, end = "<", 0
    for field in params:
        text += f"{field.offset_bytes - end}x{_CODES[field.ctype]}"
        end = field.offset_bytes + field.size_bytes
    return f"{text}{params_bytes - end}x"
