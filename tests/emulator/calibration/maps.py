"""The driver's 128 bytes of tensor maps, asked for in two ways, and what it refuses to encode."""

from __future__ import annotations

import ctypes
from typing import Any

from calibration.boxes import described, descriptions
from dsagen.errors import DeviceError, GuardError
from dsagen.tensor_map import ELEMENT_BYTES, MAP_BYTES

# The driver's enumerations, as cuda.h numbers them.
_TYPES = {name: number for number, name in enumerate(ELEMENT_BYTES)}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
_FILLS = {"zeros": 0, "nan": 1}
_ALIGNMENT = 64
# CUDA_ERROR_INVALID_VALUE: the one error that is about what was asked for.
_REFUSED = 1


def encoded_by_library(library: ctypes.CDLL, fields: dict[str, Any]) -> bytes | int:
    """The map as cuTensorMapEncodeTiled of a loaded driver makes it, or its error: nothing is checked before."""
    memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    sizes, rank = fields["sizes"], len(fields["sizes"])
    steps = fields["element_strides"] or (1,) * rank
    error = library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        ctypes.c_int(_TYPES[fields["element"]]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(fields["address"]),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * max(rank - 1, 1))(*fields["strides"]),
        (ctypes.c_uint32 * rank)(*fields["box"]),
        (ctypes.c_uint32 * rank)(*steps),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLES[fields["swizzle_bytes"]]),
        ctypes.c_int(_PROMOTIONS[fields["promotion_bytes"]]),
        ctypes.c_int(_FILLS[fields["fill"]]),
    )
    return int(error) or ctypes.string_at(address, MAP_BYTES)


def encoded_by_us(cuda: Any, fields: dict[str, Any]) -> bytes | str:
    """The map as dsagen.tensor_map has the driver encode it, or why it refuses, ours or the driver's."""
    try:
        return described(fields).encode(cuda)
    except (GuardError, DeviceError) as error:
        return str(error)


def survey(library: ctypes.CDLL, cuda: Any) -> dict[str, dict[str, Any]]:
    """A row for each description: what the driver and our encoder make of it, and whether they agree.

    An error that says nothing of the description, such as that there is no context, is no agreement.
    """
    rows = {}
    for name, fields in descriptions().items():
        theirs, ours = encoded_by_library(library, fields), encoded_by_us(cuda, fields)
        taken, accepted = isinstance(theirs, bytes), isinstance(ours, bytes)
        rows[name] = {
            "driver": theirs.hex() if isinstance(theirs, bytes) else f"error {theirs}",
            "ours": ours.hex() if isinstance(ours, bytes) else ours,
            "agree": ours == theirs if taken else theirs == _REFUSED and not accepted,
        }
    return rows
