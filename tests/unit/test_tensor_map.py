"""Tensor maps: every limit of the driver's encoder, and what either encoder is given."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dsagen.errors import DeviceError, EmulatorError, GuardError
from dsagen.tensor_map import _ENCODER, ELEMENT_BYTES, MAP_BYTES, TensorMap

GOOD = TensorMap("bfloat16", 1 << 20, (100, 60, 7), (256, 1 << 14), (64, 8, 2), swizzle_bytes=128)


@pytest.mark.parametrize(("change", "said"), [
    ({"element": "e4m3"}, "element 'e4m3': expected one of uint8"),
    ({"sizes": ()}, r"sizes \(\): a tensor has 1 to 5 dimensions"),
    ({"sizes": (8,) * 6}, r"sizes \(8.*\): a tensor has 1 to 5 dimensions"),
    ({"sizes": (100, 60)}, r"strides \(256, 16384\): 1 are needed for 2 dimensions"),
    ({"box": (64, 8)}, r"box \(64, 8\): 3 are needed for 3 dimensions"),
    ({"element_strides": (1, 1)}, "element_strides .* 3 are needed"),
    ({"address": 24}, "address .*24 is not among the integers 0 to .* that are multiples of 16"),
    ({"sizes": (0, 60, 7)}, "sizes .*0 is not among the integers 1 to 4294967296"),
    ({"sizes": (100, (1 << 32) + 1, 7)}, "sizes .*4294967297 is not among"),
    ({"sizes": (100, True, 7)}, "sizes .*True is not among"),
    ({"strides": (264, 1 << 14)}, "strides .*264 is not among the integers .* that are multiples of 16"),
    ({"strides": (256, 1 << 40)}, "strides .*1099511627776 is not among"),
    ({"box": (64, 257, 2)}, "box .*257 is not among the integers 1 to 256"),
    ({"box": (64, 0, 2)}, "box .*0 is not among"),
    ({"box": (63, 8, 2)}, "box .*a row of it takes 126 bytes, expected a multiple of 16"),
    ({"box": (72, 8, 2)}, "box .*a row of it takes 144 bytes, swizzled ones at most 128"),
    ({"element_strides": (1, 9, 1)}, "element_strides .*9 is not among the integers 1 to 8"),
    ({"swizzle_bytes": 16}, "swizzle_bytes 16: expected one of 0, 32, 64, 128"),
    ({"promotion_bytes": 32}, "promotion_bytes 32: expected one of 0, 64, 128, 256"),
    ({"fill": "ones"}, "fill 'ones': expected one of zeros, nan"),
    ({"fill": "nan", "element": "uint16"}, "fill 'nan': elements are uint16, expected a floating-point type"),
])  # fmt: skip
def test_what_a_driver_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(GuardError, match=rf"^\[T-24\] tensor map: {said}"):
        replace(GOOD, **change)


def test_the_bytes_of_a_box() -> None:
    assert GOOD.box_bytes == 128 * 8 * 2
    # The first step does not count, the others round up.
    assert replace(GOOD, element_strides=(8, 3, 2)).box_bytes == 128 * 3 * 1


def test_what_the_emulator_does_not_have_is_refused_by_it_alone() -> None:
    assert len(GOOD.encode_for_emulator()) == MAP_BYTES
    with pytest.raises(EmulatorError, match="a row of the box takes 64 of 128 swizzled bytes"):
        replace(GOOD, box=(32, 8, 2)).encode_for_emulator()


def test_the_emulator_tells_maps_apart() -> None:
    changes: list[dict[str, Any]] = [{"element": name} for name in ELEMENT_BYTES if ELEMENT_BYTES[name] == 2]
    changes += [{"address": 0}, {"sizes": (100, 61, 7)}, {"strides": (272, 1 << 14)}, {"box": (64, 9, 2)}]
    changes += [{"element_strides": (1, 1, 2)}, {"swizzle_bytes": 0}, {"fill": "nan"}]
    assert len({replace(GOOD, **change).encode_for_emulator() for change in changes}) == len(changes)


class FakeDriver:
    """What cuda.bindings.driver has for tensor maps; members of enumerations are numbered over all of them."""

    def __init__(self, error: int = 0, missing: bool = False) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._error, self._missing = error, missing
        self._function = _ENCODER(self._encode)

    def __getattr__(self, name: str) -> object:
        if not name.startswith("CUtensorMap"):
            raise AttributeError(name)
        return SimpleNamespace(**{member: MEMBERS.index(member) for member in ENUMS[name]})

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[object, int, object]:
        assert (symbol, version, flags) == (b"cuTensorMapEncodeTiled", 12000, 0)
        result = SimpleNamespace(name="CUDA_ERROR_NOT_FOUND") if self._missing else None
        return result, ctypes.cast(self._function, ctypes.c_void_p).value or 0, None

    @staticmethod
    def CUresult(code: int) -> object:
        return SimpleNamespace(name=f"ERROR_{code}")

    def _encode(self, to: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        assert to % 128 == 0
        counts = (rank, max(rank - 1, 1), rank, rank)
        arrays = [list(pointer[:count]) for pointer, count in zip(rest, counts, strict=False)]
        self.calls.append((MEMBERS[kind], rank, address, *arrays, *(MEMBERS[n] for n in rest[4:])))
        ctypes.memmove(to, bytes(range(MAP_BYTES)), MAP_BYTES)
        return self._error


ENUMS = {
    "CUtensorMapDataType": [f"CU_TENSOR_MAP_DATA_TYPE_{name.upper()}" for name in ELEMENT_BYTES],
    "CUtensorMapInterleave": ["CU_TENSOR_MAP_INTERLEAVE_NONE"],
    "CUtensorMapSwizzle": [f"CU_TENSOR_MAP_SWIZZLE_{name}" for name in ("NONE", "32B", "64B", "128B")],
    "CUtensorMapL2promotion": [f"CU_TENSOR_MAP_L2_PROMOTION_{n}" for n in ("NONE", "L2_64B", "L2_128B", "L2_256B")],
    "CUtensorMapFloatOOBfill": [f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{n}" for n in ("NONE", "NAN_REQUEST_ZERO_FMA")],
}


MEMBERS = [member for members in ENUMS.values() for member in members]


def test_what_the_driver_is_given() -> None:
    driver = FakeDriver()
    found = replace(GOOD, promotion_bytes=256, fill="nan", element_strides=(1, 2, 1)).encode(driver)
    assert found == bytes(range(MAP_BYTES))
    assert driver.calls == [(
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", 3, 1 << 20, [100, 60, 7], [256, 1 << 14], [64, 8, 2], [1, 2, 1],
        "CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_128B", "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA",
    )]  # fmt: skip


def test_the_largest_sizes_reach_the_driver() -> None:
    driver = FakeDriver()
    TensorMap("uint8", (1 << 63) + 16, (1 << 32, 2), ((1 << 40) - 16,), (256, 1)).encode(driver)
    assert driver.calls[0][2:5] == ((1 << 63) + 16, [1 << 32, 2], [(1 << 40) - 16])


def test_a_tensor_of_one_dimension_has_an_array_of_strides() -> None:
    driver = FakeDriver()
    TensorMap("uint8", 1 << 20, (100,), (), (32,)).encode(driver)
    assert driver.calls[0][3:5] == ([100], [16])


def test_the_names_are_the_drivers() -> None:
    cuda = pytest.importorskip("cuda.bindings.driver")
    for name, members in ENUMS.items():
        assert set(members) <= set(getattr(cuda, name).__members__)
    # The emulator numbers the types in the same way.
    kinds = cuda.CUtensorMapDataType
    assert [int(getattr(kinds, member)) for member in ENUMS["CUtensorMapDataType"]] == list(range(len(ELEMENT_BYTES)))


def test_a_refusal_of_the_driver() -> None:
    with pytest.raises(DeviceError, match=r"cuTensorMapEncodeTiled: ERROR_1 for TensorMap\(element="):
        GOOD.encode(FakeDriver(1))
    with pytest.raises(DeviceError, match=r"the driver has no cuTensorMapEncodeTiled \(CUDA_ERROR_NOT_FOUND\)"):
        GOOD.encode(FakeDriver(missing=True))
