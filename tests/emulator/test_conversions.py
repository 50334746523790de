"""cvt against numpy and torch, over all codes where there are few."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from micro import compute

RANDOM = np.random.default_rng(3)


@pytest.mark.parametrize(
    ("kind", "from_type", "to_type"),
    [
        ("u64.u32", np.uint32, np.uint64), ("s64.s32", np.int32, np.int64), ("u32.u64", np.uint64, np.uint32),
        ("s32.s16", np.int16, np.int32), ("u32.u16", np.uint16, np.uint32), ("u16.u32", np.uint32, np.uint16),
    ],
)  # fmt: skip
def test_widths(kind: str, from_type: type, to_type: type) -> None:
    info = np.iinfo(from_type)
    a = RANDOM.integers(info.min, info.max, 32, dtype=from_type, endpoint=True)
    assert np.array_equal(compute(f"cvt.{kind} {{out}}, {{a}};", [a], to_type), a.astype(to_type))


def test_a_byte_is_sign_extended_to_its_register() -> None:
    a = np.arange(112, 144, dtype=np.uint32)
    want = a.astype(np.int8).astype(np.int32)
    assert np.array_equal(compute("cvt.s8.s32 {out}, {a};", [a], np.int32), want)
    assert np.array_equal(compute("cvt.s16.s8 %h1, {a}; cvt.s32.s16 {out}, %h1;", [a], np.int32), want)
    saturated = compute("cvt.sat.s8.s32 {out}, {a};", [a], np.int32)
    assert np.array_equal(saturated, np.minimum(a, 127).astype(np.int32))


@pytest.mark.parametrize(
    ("mode", "rounded"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_float_to_integer_saturates(mode: str, rounded: np.ufunc) -> None:
    a = np.resize(np.array([0.5, 1.5, -2.5, 1e20, -1e20, np.nan, 3.7, -3.7], np.float32), 32)
    found = compute(f"cvt.{mode}.s32.f32 {{out}}, {{a}};", [a], np.int32)
    want = np.where(np.isnan(a), 0, np.clip(rounded(a.astype(np.float64)), -(2**31), 2**31 - 1)).astype(np.int32)
    assert np.array_equal(found, want)


@pytest.mark.parametrize(("pair", "dtype"), [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
def test_pairs_round_to_even_and_take_the_first_source_on_top(pair: str, dtype: torch.dtype) -> None:
    a, b = ((RANDOM.standard_normal(32) * 10.0 ** RANDOM.integers(-9, 6, 32)).astype(np.float32) for _ in range(2))
    a[:4] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    found = compute(f"cvt.rn.{pair}.f32 {{out}}, {{a}}, {{b}};", [a, b], np.uint32).view(np.uint16).reshape(32, 2)
    for column, values in ((1, a), (0, b)):
        want = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(found[:, column], want)


@pytest.mark.parametrize(("codes", "dtype"), [("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)])
def test_all_fp8_codes(codes: str, dtype: torch.dtype) -> None:
    every = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(every).view(dtype).to(torch.float32).numpy()
    for part in range(4):
        two = every[64 * part : 64 * part + 64]
        found = compute(f"cvt.rn.f16x2.{codes} {{out}}, {{a}};", [two.view(np.uint16)], np.uint32).view(np.float16)
        np.testing.assert_array_equal(found.astype(np.float32), want[64 * part : 64 * part + 64])


@pytest.mark.parametrize(
    ("codes", "dtype", "largest"), [("e4m3x2", torch.float8_e4m3fn, 448.0), ("e5m2x2", torch.float8_e5m2, 57344.0)]
)
def test_to_fp8_saturates(codes: str, dtype: torch.dtype, largest: float) -> None:
    a = (RANDOM.standard_normal(32) * 2.0 ** RANDOM.integers(-12, 12, 32)).astype(np.float32)
    a[:3] = [1e6, -1e6, 464.0]
    found = compute(f"cvt.rn.satfinite.{codes}.f32 {{out}}, {{a}}, {{a}};", [a], np.uint16)
    want = torch.from_numpy(np.clip(a, -largest, largest)).to(dtype).view(torch.uint8).numpy().astype(np.uint16)
    assert np.array_equal(found, want << 8 | want)


def test_fp4_codes() -> None:
    want = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float16)
    low = np.resize(np.arange(16, dtype=np.uint16), 32)
    found = compute("cvt.rn.f16x2.e2m1x2 {out}, {a};", [low | 0x50], np.uint32).view(np.float16).reshape(32, 2)
    np.testing.assert_array_equal(found[:16, 0], want)
    assert (found[:, 1] == 3).all()
