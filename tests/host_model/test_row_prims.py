"""Models of the prims that move and convert rows, against numpy and the element types' own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from host import COMPILER
from small_kernel import run

from dsagen.dtype import E4M3

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def test_global_words_of_every_width() -> None:
    out, _ = run(
        """
        const u8* bytes = reinterpret_cast<const u8*>(in);
        if (t < 8) ptx::store_global_16(out + 4 * t, ptx::load_global_16(bytes + 16 * t));
        if (t < 16) ptx::store_global_8(out + 32 + 2 * t, ptx::load_global_8(bytes + 128 + 8 * t));
        ptx::store_global_4(out + 64 + t, ptx::load_global_4(bytes + 256 + 4 * t));
        u8* to = reinterpret_cast<u8*>(out);
        for (int i = t + 512; i < 1024; i += 64) ptx::store_global_1(to + i, ptx::load_global_1(bytes + i));
        """
    )
    assert np.array_equal(out, np.arange(256))


def test_single_roundings() -> None:
    random = np.random.default_rng(2)
    values = random.standard_normal(256).astype(np.float32)
    out, _ = run(
        "out[t] = ptx::add_rn(in[t], in[t + 64]); out[t + 64] = ptx::mul_rn(in[t], in[t + 64]);"
        "out[t + 128] = ptx::div_rn(in[t], in[t + 64]);",
        values,
    )
    a, b = values[:64], values[64:128]
    assert np.array_equal(out[:192], np.concatenate([a + b, a * b, a / b]))


def test_halves_are_read_exactly() -> None:
    halves = np.random.default_rng(3).integers(0, 1 << 16, 256).astype(np.uint32)
    body = "for (int i = t; i < 256; i += 64) out[i] = ptx::float_of_f16(ptx::bits_of(in[i]));"
    found, _ = run(body, halves.view(np.float32))
    assert np.array_equal(found, halves.astype(np.uint16).view(np.float16).astype(np.float32), equal_nan=True)


def test_e4m3_codes_are_the_nearest() -> None:
    sizes = np.array([E4M3.decode(code) for code in range(0x7F)], np.float32)
    middles = (sizes[1:] + sizes[:-1]) / 2
    values = np.concatenate([middles, -middles, np.float32([0.0, -0.0, 1e9, -np.inf])])
    body = "for (int i = t; i < 256; i += 64) out[i] = ptx::float_of(ptx::pack_e4m3(in[i], -in[i]));"
    found = run(body, values)[0].view(np.uint32)
    for value, codes in zip(values.tolist(), found.tolist(), strict=True):
        assert codes == E4M3.encode(value) | E4M3.encode(-value) << 8
    nan = run("out[t] = ptx::float_of(ptx::pack_e4m3(in[t], 1.0f));", np.full(256, np.nan, np.float32))[0]
    assert nan[:64].view(np.uint32).tolist() == [0x387F] * 64
