"""Tensor maps: which part of a tensor one tensor copy moves, described once, encoded for a driver or for the emulator.

A kernel takes 128 opaque bytes. On a device cuTensorMapEncodeTiled makes them; for the emulator, which runs where no
driver is, they hold the description itself.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

from dsagen.errors import DeviceError, EmulatorError, GuardError

MAP_BYTES = 128
MOST_RANK, MOST_BOX, MOST_ELEMENT_STRIDE = 5, 256, 8
MOST_SIZE, STRIDE_LIMIT = 1 << 32, 1 << 40
_UNIT = 16
# Bytes of an element by type, numbered as the driver and vm/tensor_map.cpp do.
ELEMENT_BYTES = {
    "uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
    "bfloat16": 2, "float32_ftz": 4, "tfloat32": 4, "tfloat32_ftz": 4,
}  # fmt: skip
# Bytes of a row that swizzling mixes, and of an L2 request, with what the driver calls them.
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}
_FILLS = {"zeros": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}
# The driver's encoder: to a map, type, rank, address, sizes, strides, box, element strides, and four enumerations.
_SYMBOL, _SINCE, _ALIGNMENT = b"cuTensorMapEncodeTiled", 12000, 128
_WIDE, _NARROW = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
_ENCODER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, _WIDE, _WIDE, _NARROW, _NARROW,
    *(ctypes.c_int,) * 4,
)  # fmt: skip
# struct Map of vm/tensor_map.cpp.
_EMULATED = struct.Struct("<8sBBBBIQ5I4Q5H5B")
_MAGIC = b"dsagenTM"


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one copy moves. Dimensions stand fastest first.

    `element` is a type of ELEMENT_BYTES; elements of other types of the same size may travel as unsigned integers.
    `address` is that of the first element, `sizes` are in elements, `strides` in bytes for every dimension but the
    first, whose elements are adjacent. `box` counts elements, of which every `element_strides`-th is loaded.
    `swizzle_bytes` is the row within which 16-byte units are exchanged in shared memory, `promotion_bytes` what the L2
    cache fetches at least. Elements outside of the tensor are loaded as `fill`, and never stored. GuardError for
    whatever a driver refuses.
    """

    element: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle_bytes: int = 0
    promotion_bytes: int = 0
    fill: str = "zeros"

    def __post_init__(self) -> None:
        _require_one_of("element", self.element, tuple(ELEMENT_BYTES))
        if not 1 <= self.rank <= MOST_RANK:
            raise _refusal("sizes", self.sizes, f"a tensor has 1 to {MOST_RANK} dimensions")
        for name, values, count in (
            ("strides", self.strides, self.rank - 1),
            ("box", self.box, self.rank),
            ("element_strides", self.steps, self.rank),
        ):
            if len(values) != count:
                raise _refusal(name, values, f"{count} are needed for {self.rank} dimensions")
        self._require_memory()
        self._require_box()

    def _require_memory(self) -> None:
        _require("address", (self.address,), 0, (1 << 64) - 1, _UNIT)
        _require("sizes", self.sizes, 1, MOST_SIZE)
        _require("strides", self.strides, 0, STRIDE_LIMIT - 1, _UNIT)

    def _require_box(self) -> None:
        _require("box", self.box, 1, MOST_BOX)
        _require("element_strides", self.steps, 1, MOST_ELEMENT_STRIDE)
        _require_one_of("swizzle_bytes", self.swizzle_bytes, tuple(_SWIZZLES))
        _require_one_of("promotion_bytes", self.promotion_bytes, tuple(_PROMOTIONS))
        _require_one_of("fill", self.fill, tuple(_FILLS))
        if self.row_bytes % _UNIT:
            raise _refusal("box", self.box, f"a row of it takes {self.row_bytes} bytes, expected a multiple of {_UNIT}")
        if self.swizzle_bytes and self.row_bytes > self.swizzle_bytes:
            raise _refusal(
                "box", self.box, f"a row of it takes {self.row_bytes} bytes, swizzled ones at most {self.swizzle_bytes}"
            )
        if self.fill == "nan" and "float" not in self.element:
            raise _refusal("fill", self.fill, f"elements are {self.element}, expected a floating-point type")

    @property
    def rank(self) -> int:
        """Dimensions."""
        return len(self.sizes)

    @property
    def steps(self) -> tuple[int, ...]:
        """Element strides of all dimensions."""
        return self.element_strides or (1,) * self.rank

    @property
    def row_bytes(self) -> int:
        """Bytes of the box in its first dimension."""
        return self.box[0] * ELEMENT_BYTES[self.element]

    @property
    def box_bytes(self) -> int:
        """Bytes that a load of the box counts at its mbarrier, those outside of the tensor as well."""
        count = self.row_bytes
        for extent, step in zip(self.box[1:], self.steps[1:], strict=True):
            count *= -(-extent // step)
        return count

    def encode_for_emulator(self) -> bytes:
        """128 bytes for a kernel on the emulator. EmulatorError for what it does not have."""
        if self.swizzle_bytes and self.row_bytes != self.swizzle_bytes:
            raise EmulatorError(
                f"tensor map: a row of the box takes {self.row_bytes} of {self.swizzle_bytes} swizzled bytes: a device "
                "leaves gaps between such rows, which the emulator does not have; make the box as wide as what is "
                "swizzled"
            )
        kind = (tuple(ELEMENT_BYTES).index(self.element), self.swizzle_bytes, ELEMENT_BYTES[self.element])
        arrays = [*_padded([size - 1 for size in self.sizes], MOST_RANK), *_padded(self.strides, MOST_RANK - 1)]
        arrays += [*_padded(self.box, MOST_RANK), *_padded(self.steps, MOST_RANK)]
        fields = _EMULATED.pack(_MAGIC, self.rank, *kind, self.fill == "nan", self.address, *arrays)
        return fields.ljust(MAP_BYTES, b"\0")

    def encode(self, cuda: Any) -> bytes:
        """128 bytes for a kernel on a device, by `cuda`, the module cuda.bindings.driver.

        The driver's function is called at its address: a map of that module lies as Python's objects do, aligned to
        less than the driver takes. DeviceError where the driver refuses, or has no such function.
        """
        result, function, *_ = cuda.cuGetProcAddress(_SYMBOL, _SINCE, 0)
        if result or not function:
            raise DeviceError(f"the driver has no {_SYMBOL.decode()} ({result.name}): it takes one of CUDA 12 or newer")
        memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        # Of one dimension there is no stride; the driver gets an array all the same.
        strides = self.strides or (_UNIT,)
        error = _ENCODER(int(function))(
            address,
            _member(cuda, "DataType", "DATA_TYPE", self.element.upper()),
            self.rank,
            self.address,
            (ctypes.c_uint64 * self.rank)(*self.sizes),
            (ctypes.c_uint64 * len(strides))(*strides),
            (ctypes.c_uint32 * self.rank)(*self.box),
            (ctypes.c_uint32 * self.rank)(*self.steps),
            _member(cuda, "Interleave", "INTERLEAVE", "NONE"),
            _member(cuda, "Swizzle", "SWIZZLE", _SWIZZLES[self.swizzle_bytes]),
            _member(cuda, "L2promotion", "L2_PROMOTION", _PROMOTIONS[self.promotion_bytes]),
            _member(cuda, "FloatOOBfill", "FLOAT_OOB_FILL", _FILLS[self.fill]),
        )
        if error:
            raise DeviceError(f"{_SYMBOL.decode()}: {cuda.CUresult(error).name} for {self}")
        return ctypes.string_at(address, MAP_BYTES)


def _member(cuda: Any, enum: str, prefix: str, name: str) -> int:
    return int(getattr(getattr(cuda, f"CUtensorMap{enum}"), f"CU_TENSOR_MAP_{prefix}_{name}"))


def _padded(values: list[int] | tuple[int, ...], count: int) -> list[int]:
    return [*values, *(0,) * (count - len(values))]


def _require(name: str, values: tuple[int, ...], least: int, most: int, unit: int = 1) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most or value % unit:
            among = f" that are multiples of {unit}" if unit > 1 else ""
            raise _refusal(name, values, f"{value!r} is not among the integers {least} to {most}{among}")


def _require_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise _refusal(name, value, f"expected one of {', '.join(map(str, known))}")


def _refusal(name: str, value: object, why: str) -> GuardError:
    return GuardError(f"[T-24] tensor map: {name} {value!r:.200}: {why}")
