"""The recipes that make matrix operands of codes and scales, on the CPU: every code under every scale, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from host import COMPILER
from small_kernel import run

from dsagen.dtype import E2M1, E4M3, UE4M3, UE8M0, ElementType

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# A row type with just the constants that the encodings read.
ROW = """
struct Row {{
  static constexpr int kNopeDims = 512, kRopeDims = 0, kRopeOffsetBytes = 0, kRowPitchBytes = 592, kValueDims = 512;
  static constexpr int kQueryPitchBytes = 1040, kScaleGroupDims = {group}, kScaleOffsetBytes = 576;
  static constexpr int kValueWarps = 8, kHeads = {heads}, kGroupsTogether = 1;
}};
"""
CODES = '#include "prims/kv/e4m3_operands.cuh"\n'
FP8 = '#include "prims/kv/fp8_ue8m0_scale.cuh"\n' + ROW.format(group=32, heads=64)
FP4 = '#include "prims/kv/fp4_e4m3_scale.cuh"\n' + ROW.format(group=16, heads=16)
BYTES = np.arange(256, dtype=np.uint32)


def words(prelude: str, statement: str, inputs: np.ndarray, scales: int = 1, arch: str = "sm_90a") -> np.ndarray:
    """uint32 [scales, inputs]: `x` after a statement over the word `w` and the scale byte `s`."""
    body = f"""
      for (int i = t; i < 256; i += 64) {{
        const u32 w = reinterpret_cast<const u32*>(in)[i], s = ptx::block_index();
        u32 x = s, y = 0;
        (void)y;
        {statement}
        reinterpret_cast<u32*>(out)[i] = x;
      }}
    """
    given = np.zeros(256, np.uint32)
    given[: len(inputs)] = inputs
    out, _ = run(body, given.view(np.float32), grid=scales, prelude=prelude, arch=arch)
    return out.view(np.uint32).reshape(scales, 256)[:, : len(inputs)]


def f16(found: np.ndarray) -> np.ndarray:
    """Values [.., 2] of pairs, the low half first."""
    return np.stack((found & 0xFFFF, found >> 16), -1).astype(np.uint16).view(np.float16).astype(np.float64)


def bf16(found: np.ndarray) -> np.ndarray:
    """The same of bf16."""
    return (np.stack((found & 0xFFFF, found >> 16), -1).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def values(element: ElementType) -> np.ndarray:
    """What each code means."""
    return np.array([element.decode(code) for code in range(1 << element.bits)])


def same(found: np.ndarray, want: np.ndarray) -> None:
    """Equal to the bit but for the sign of zeros that a sign of a zero code has as well."""
    np.testing.assert_array_equal(found, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(want)[numbers])


@pytest.mark.parametrize(("arch", "scale", "nan"), [("sm_90a", 1.0, np.nan), ("sm_80", 256.0, 480.0)])
def test_keys_of_e4m3(arch: str, scale: float, nan: float) -> None:
    want = values(E4M3)
    want[0x7F], want[0xFF] = nan, -nan
    spread = BYTES | (BYTES ^ 0x55) << 8 | (BYTES ^ 0xAA) << 16 | (255 - BYTES) << 24
    for half, bytes_ in enumerate(((BYTES, BYTES ^ 0x55), (BYTES ^ 0xAA, 255 - BYTES))):
        statement = f"kv::key_pairs(w, {'x, y' if half == 0 else 'y, x'});"
        found = f16(words(CODES, statement, spread, arch=arch))[0] * scale
        same(found, np.stack([want[b] for b in bytes_], -1))


def test_values_of_e4m3() -> None:
    want = values(E4M3)
    want[0x7F], want[0xFF] = 480, -480
    spread = BYTES | (255 - BYTES) << 8 | (BYTES ^ 0x3C) << 16 | (BYTES ^ 0xC3) << 24
    even = bf16(words(CODES, "kv::value_pairs(w, x, y);", spread))[0] * 2.0**120
    odd = bf16(words(CODES, "kv::value_pairs(w, y, x);", spread))[0] * 2.0**120
    same(even, np.stack((want[BYTES], want[BYTES ^ 0x3C]), -1))
    same(odd, np.stack((want[255 - BYTES], want[BYTES ^ 0xC3]), -1))


@pytest.mark.parametrize("byte", range(4))
def test_powers_of_two_on_scores(byte: int) -> None:
    noise = np.uint32(0x5A5A5A5A) & ~np.uint32(0xFF << 8 * byte)
    statement = f"x = ptx::bits_of(kv::Fp8Ue8m0Scale<Row>::power_of(w, {byte}));"
    found = words(FP8, statement, BYTES << 8 * byte | noise)[0].view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(found, values(UE8M0))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_e4m3_values_times_powers_of_two(arch: str) -> None:
    """Scales of 2^-64 to 2^67 on values; those of the probabilities alone are any that bf16 has."""
    statement = "kv::value_pairs(w, x, y); x = ptx::mul_bf16x2(x, ((s | s << 16) + 0x003c003cu) << 7);"
    found = bf16(words(FP8, statement, BYTES | BYTES << 16, 256, arch)) * 2.0**60
    codes = values(E4M3)
    codes[0x7F], codes[0xFF] = 480, -480
    scales = slice(63, 195)
    want = codes[None, :] * values(UE8M0)[:, None]
    same(found[scales], np.stack((want, want), -1)[scales])


@pytest.mark.parametrize(("heads", "least", "end"), [(64, 0, 195), (40, 0, 195), (32, 1, 255), (8, 1, 255)])
def test_where_the_scales_of_e4m3_values_end(heads: int, least: int, end: int) -> None:
    """By the kernel's own factors. Beyond 32 heads they carry 2^60 of the 2^120 that values lack, which bf16 holds
    up to a scale of 2^67: from 2^68 on values are wrong. Up to 32 heads they go to the probabilities, any of bf16.
    """
    prelude = '#include "prims/kv/fp8_ue8m0_scale.cuh"\n' + ROW.format(group=32, heads=heads)
    statement = f"""
        using Values = kv::Fp8Ue8m0Scale<Row>::Values<64, {heads // 8}>;
        alignas(Values) unsigned char raw[sizeof(Values)];
        Values& values = reinterpret_cast<Values&>(raw);
        values.scale[0] = s | s << 16;
        x = values.factors(0, 0);
    """
    code = np.array([0x38], np.uint32)
    factors = bf16(words(prelude, statement, code, 256))[:, 0, 0]
    carried = 2.0**60 if heads > 32 else 1.0
    right = values(UE8M0) * carried == factors
    assert right[least:end].all() and not right[end:].any()
    assert right[127 - 66 : 127 + 50 + 1].all()  # the declared range
    if heads > 32:
        # First infinity, then the exponent's carry is a sign over next to nothing.
        assert np.isinf(factors[195])
        assert (np.signbit(factors[196:]) & (np.abs(factors[196:]) < 1)).all()


def nibbles(code: np.ndarray) -> np.ndarray:
    """Words whose nibble i is code + i, modulo 16."""
    word = np.zeros_like(code)
    for i in range(8):
        word |= (code + i) % 16 << 4 * i
    return word


@pytest.mark.parametrize(("arch", "factor", "nan"), [("sm_90a", 2.0**6, np.nan), ("sm_80", 2.0**14, 480.0)])
@pytest.mark.parametrize("j", range(4))
def test_keys_of_fp4(j: int, arch: str, factor: float, nan: float) -> None:
    code = np.arange(16, dtype=np.uint32)
    statement = f"""
      u32 low, high;
      kv::Fp4E4m3Scale<Row>::key_scales(s | s << 16, low, high);
      const u32 factor = ptx::permute_bytes(i % 2 ? low : high, 0, 0x1010);
      u32 pair[4];
      kv::Fp4E4m3Scale<Row>::key_pairs(w, pair);
      x = ptx::mul_f16x2(pair[{j}], factor);
    """
    found = f16(words(FP4, statement, nibbles(code), 128, arch)) * factor
    scales = values(UE4M3)[:128]
    scales[0x7F] = nan
    first, second = (j, j + 4) if arch == "sm_80" else ((0, 2), (4, 6), (1, 3), (5, 7))[j]
    pair = np.stack((values(E2M1)[(code + first) % 16], values(E2M1)[(code + second) % 16]), -1)
    same(found, pair[None] * scales[:, None, None])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("j", range(4))
def test_values_of_fp4(j: int, arch: str) -> None:
    code = np.arange(16, dtype=np.uint32)
    statement = f"""
      const u32 factor = ptx::mul_bf16x2((s | s << 16) << 4, 0x7f007f00u);
      x = ptx::mul_bf16x2(kv::Fp4E4m3Scale<Row>::code_pair<6>(w, {j}), factor);
    """
    found = bf16(words(FP4, statement, nibbles(code), 128, arch)) * 2.0**119
    scales = values(UE4M3)[:128]
    scales[0x7F] = 480
    pair = np.stack((values(E2M1)[(code + j) % 16], values(E2M1)[(code + j + 4) % 16]), -1)
    same(found, pair[None] * scales[:, None, None])
