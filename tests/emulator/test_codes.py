"""cvt to and from every format against exact arithmetic: all codes where there are few, corners of the others."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise, product

import exact
import numpy as np
import pytest
from exact import FORMATS, Format, Number
from micro import compute

RANDOM = np.random.default_rng(23)
UINTS = {8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NARROW = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def all_pairs(fmt: Format, bits: int) -> np.ndarray:
    """Every code in both halves of a pair, in blocks of 512."""
    codes = np.arange(1 << fmt.bits)
    pairs = np.concatenate([codes << bits | codes[::-1], codes << bits | np.roll(codes, 3)])
    return np.resize(pairs, -(-len(pairs) // 512) * 512)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", NARROW)
def test_every_narrow_code_to_f16(kind: str, relu: str) -> None:
    fmt, f16 = FORMATS[kind], FORMATS["f16"]
    bits = 4 if kind == "e2m1" else 8
    pairs = all_pairs(fmt, bits)
    for start in range(0, len(pairs), 512):
        a = pairs[start : start + 512].astype(np.uint16)
        found = compute(f"cvt.rn{relu}.f16x2.{kind}x2 {{out}}, {{a}};", [a], np.uint32)
        for code, got in zip(a, found, strict=True):
            for at in range(2):
                want = f16.code(fmt.value(int(code) >> bits * at & ((1 << bits) - 1)), relu=relu != "")
                assert int(got) >> 16 * at & 0xFFFF == want


def of_both_signs(values: list[float]) -> list[float]:
    return [sign * value for value in values for sign in (1, -1)]


def beyond(fmt: Format) -> list[float]:
    """What is no finite value of a format, and what is too large or too small for it."""
    most, least = (exact.as_float(fmt.value(code)) for code in (fmt.largest, 1))
    return of_both_signs([math.inf, math.nan, 0.0, 1e-40, 3e38, most * 1.06, most * 1.5, most * 4, least / 4])


def interesting(fmt: Format) -> list[float]:
    """Around every value of a format: itself, the middle to the next, a little to both sides, and what is beyond."""
    out = []
    for low, high in pairwise(sorted({exact.as_float(fmt.value(code)) for code in range(fmt.largest + 1)})):
        middle = (low + high) / 2
        out += [low, middle, float(np.nextafter(np.float32(middle), np.float32(0))), middle * (1 + 2.0**-20)]
    return beyond(fmt) + of_both_signs(out)


def in_blocks(values: list[float], dtype: type) -> np.ndarray:
    return np.resize(np.array(values, dtype), (-(-len(values) // 512), 512))


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", NARROW)
def test_f32_to_every_narrow_code(kind: str, relu: str) -> None:
    fmt, bits = FORMATS[kind], 4 if kind == "e2m1" else 8
    for a in in_blocks(interesting(fmt), np.float32):
        b = a[::-1].copy()
        found = compute(f"cvt.rn.satfinite{relu}.{kind}x2.f32 {{out}}, {{a}}, {{b}};", [a, b], np.uint16)
        for got, *sources in zip(found, a, b, strict=True):
            high, low = (fmt.code(exact.of_float(float(x)), finite=True, relu=relu != "") for x in sources)
            assert int(got) == high << bits | low, [x.hex() for x in map(float, sources)]


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_f16_to_fp8(kind: str, relu: str) -> None:
    fmt = FORMATS[kind]
    codes = np.arange(1 << 16, dtype=np.uint32)[:: 7 if relu else 1]
    pairs = np.resize(codes << 16 | codes[::-1], (-(-len(codes) // 1024), 1024))
    wanted = np.zeros(1 << 16, np.uint16)
    for code in codes:
        wanted[code] = fmt.code(FORMATS["f16"].value(int(code)), finite=True, relu=relu != "")
    text = f"cvt.rn.satfinite{relu}.{kind}x2.f16x2 {{out}}, {{a}};"
    for a in pairs:
        assert np.array_equal(compute(text, [a], np.uint16), wanted[a >> 16] << 8 | wanted[a & 0xFFFF])


def exponent_code(value: float, mode: str, *, finite: bool) -> int:
    """ue8m0: the exponent of the magnitude, rounded."""
    if math.isnan(value):
        return 0xFF
    if math.isinf(value):
        return 0xFE if finite else 0xFF
    if value == 0 or abs(value) <= 2.0**-127:
        return 0
    exponent = math.frexp(abs(value))[1] - 1
    exponent += mode == "rp" and math.ldexp(1, exponent) < abs(value)
    code = max(exponent + 127, 0)
    return min(code, 0xFE) if finite else code


@pytest.mark.parametrize("satfinite", ["", ".satfinite"])
@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_every_exponent(mode: str, satfinite: str) -> None:
    finite = satfinite != ""
    powers = [
        math.ldexp(scale, e) for e in range(-149, 128) for scale in (1, 1.25, 1.99) if math.ldexp(scale, e) < 3.4e38
    ]
    values = [sign * power for power in powers for sign in (1, -1)] + [0.0, math.inf, -math.inf, math.nan, 3.4028234e38]
    for a in in_blocks(values, np.float32):
        want = [exponent_code(float(x), mode, finite=finite) for x in a]
        found = compute(f"cvt.{mode}{satfinite}.ue8m0x2.f32 {{out}}, {{a}}, {{b}};", [a, a[::-1].copy()], np.uint16)
        assert found.tolist() == [high << 8 | low for high, low in zip(want, want[::-1], strict=True)]
        halves = a.view(np.uint32) >> 16
        narrow = [exponent_code(float(x), mode, finite=finite) for x in (halves << 16).view(np.float32)]
        found = compute(f"cvt.{mode}{satfinite}.ue8m0x2.bf16x2 {{out}}, {{a}};", [halves << 16 | 0x4000], np.uint16)
        assert found.tolist() == [code << 8 | exponent_code(2.0, mode, finite=finite) for code in narrow]


def test_every_exponent_code_to_bf16() -> None:
    for codes in np.arange(256, dtype=np.uint16).reshape(1, 256):
        found = compute("cvt.rn.bf16x2.ue8m0x2 {out}, {a};", [codes << 8 | (255 - codes)], np.uint32)
        for got, code in zip(found, codes, strict=True):
            for at, wanted in ((16, int(code)), (0, 255 - int(code))):
                want = 0x7FFF if wanted == 255 else 0x0040 if wanted == 0 else wanted << 7
                assert int(got) >> at & 0xFFFF == want


def wide_values(kind: str) -> np.ndarray:
    """Codes of a wide type: random ones, and around the ends and ties of narrower types."""
    fmt = FORMATS[kind]
    if kind in ("f16", "bf16"):
        return RANDOM.integers(0, 1 << 16, 256).astype(np.uint16)
    values = [v for other in ("f16", "bf16") for v in beyond(FORMATS[other])]
    values += [
        2**31 - 1.5,
        2**31,
        -(2**31) - 0.5,
        65504,
        65519,
        65520,
        0.5,
        1.5,
        -2.5,
        2**63,
        -(2**63),
        2**64,
        255.5,
        -128.5,
    ]
    values += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-24, 1 + 2.0**-53 + 2.0**-24]
    codes = [fmt.code(exact.of_float(value)) for value in values]
    codes += [int(x) for x in RANDOM.integers(0, 1 << fmt.bits, 192, dtype=np.uint64)]
    return np.resize(np.array(codes, UINTS[fmt.bits]), -(-len(codes) // 128) * 128)


def each_block(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 128)


ROUNDED = {
    ("f16", "f32"): ("rn", "rz"), ("bf16", "f32"): ("rn", "rz"), ("tf32", "f32"): ("rn", "rz", "rna"),
    ("f32", "f64"): ("rn", "rz", "rm", "rp"), ("f16", "f64"): ("rn", "rz", "rm", "rp"),
    ("bf16", "f64"): ("rn", "rz", "rm", "rp"), ("bf16", "f16"): ("rn", "rz", "rm", "rp"),
    ("f16", "bf16"): ("rn", "rz", "rm", "rp"),
}  # fmt: skip


@pytest.mark.parametrize(("kinds", "mode"), [(kinds, mode) for kinds, modes in ROUNDED.items() for mode in modes])
def test_floats_to_narrower_ones(kinds: tuple[str, str], mode: str) -> None:
    to, source = kinds
    fmt, given = FORMATS[to], FORMATS[source]
    for a in each_block(wide_values(source)):
        found = compute(f"cvt.{mode}.{to}.{source} {{out}}, {{a}};", [a], UINTS[32 if to == "tf32" else fmt.bits])
        want = [fmt.code(given.value(int(x)), mode) << (13 if to == "tf32" else 0) for x in a]
        if mode == "rna":
            # Of NaN the upper bits stay.
            want = [
                int(x) & 0xFFFFE000 if int(x) & 0x7FFFFFFF > 0x7F800000 else code
                for x, code in zip(a, want, strict=True)
            ]
        assert found.tolist() == want


@pytest.mark.parametrize("to", ["f16", "bf16", "tf32"])
@pytest.mark.parametrize(("mode", "relu", "satfinite"), [
    ("rn", ".relu", ""), ("rz", ".relu", ""), ("rn", "", ".satfinite"), ("rz", ".relu", ".satfinite"),
])  # fmt: skip
def test_qualifiers_of_f32_to_halves(to: str, mode: str, relu: str, satfinite: str) -> None:
    fmt, order = FORMATS[to], satfinite + relu if to == "tf32" else relu + satfinite
    for a in each_block(wide_values("f32")):
        want = [fmt.code(FORMATS["f32"].value(int(x)), mode, relu=relu != "", finite=satfinite != "") for x in a]
        if to == "tf32":
            assert compute(f"cvt.{mode}{order}.tf32.f32 {{out}}, {{a}};", [a], np.uint32).tolist() == [
                x << 13 for x in want
            ]
            continue
        assert compute(f"cvt.{mode}{order}.{to}.f32 {{out}}, {{a}};", [a], np.uint16).tolist() == want
        pairs = compute(f"cvt.{mode}{order}.{to}x2.f32 {{out}}, {{a}}, {{b}};", [a, a[::-1].copy()], np.uint32)
        assert pairs.tolist() == [high << 16 | low for high, low in zip(want, want[::-1], strict=True)]


@pytest.mark.parametrize("kinds", [("f32", "f16"), ("f32", "bf16"), ("f64", "f16"), ("f64", "bf16"), ("f64", "f32")])
def test_floats_to_wider_ones(kinds: tuple[str, str]) -> None:
    to, source = kinds
    fmt, given = FORMATS[to], FORMATS[source]
    for a in each_block(wide_values(source)):
        found = compute(f"cvt.{to}.{source} {{out}}, {{a}};", [a], UINTS[fmt.bits])
        for x, got in zip(a, found, strict=True):
            value = given.value(int(x))
            nan = isinstance(value, float) and math.isnan(value)
            got_value = fmt.value(int(got))
            assert (isinstance(got_value, float) and math.isnan(got_value)) if nan else int(got) == fmt.code(value)


WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def whole(value: Number, mode: str) -> int:
    assert not isinstance(value, float)
    return int(WHOLE[mode](-value[1] if value[0] else value[1]))


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize(("to", "source"), list(product(INTEGERS, ("f16", "bf16", "f32", "f64"))))
def test_floats_to_integers(to: str, source: str, mode: str) -> None:
    bits, fmt = int(to[1:]), FORMATS[source]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    width = max(bits, 16)
    for a in each_block(wide_values(source))[:1]:
        found = compute(f"cvt.{mode}.{to}.{source} {{out}}, {{a}};", [a], UINTS[width])
        for x, got in zip(a, found, strict=True):
            value = fmt.value(int(x))
            if isinstance(value, float):
                nan = 1 << 63 if bits == 64 else 0
                want = nan if math.isnan(value) else high if value > 0 else low
            else:
                want = min(max(whole(value, mode), low), high)
            assert int(got) == want % (1 << width), (hex(x), hex(got), want)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("to", "source"), list(product(("f16", "bf16", "f32", "f64"), INTEGERS)))
def test_integers_to_floats(to: str, source: str, mode: str) -> None:
    bits, fmt = int(source[1:]), FORMATS[to]
    width = max(bits, 16)
    raw = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1, 0x5555555555555555]
    raw += [1 << n for n in range(bits)] + [(1 << n) + 1 for n in range(bits)] + [(3 << n) - 1 for n in range(bits - 1)]
    raw += [int(x) for x in RANDOM.integers(0, 1 << 64, 32, dtype=np.uint64, endpoint=False)] if bits == 64 else []
    values = np.resize(np.array([x & ((1 << bits) - 1) for x in raw], UINTS[width]), -(-len(raw) // 128) * 128)
    for a in each_block(values):
        found = compute(f"cvt.{mode}.{to}.{source} {{out}}, {{a}};", [a], UINTS[fmt.bits])
        for x, got in zip(a, found, strict=True):
            value = int(x) - (1 << bits) if source[0] == "s" and int(x) >> (bits - 1) else int(x)
            assert int(got) == fmt.code((int(value < 0), Fraction(abs(value))), mode), (value, hex(got))


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_floats_to_whole_floats(kind: str, mode: str) -> None:
    fmt = FORMATS[kind]
    for a in each_block(wide_values(kind)):
        found = compute(f"cvt.{mode}.{kind}.{kind} {{out}}, {{a}};", [a], UINTS[fmt.bits])
        for x, got in zip(a, found, strict=True):
            value = fmt.value(int(x))
            if isinstance(value, float) and math.isnan(value):
                assert math.isnan(exact.as_float(fmt.value(int(got))))
                continue
            want = value if isinstance(value, float) else (value[0], Fraction(abs(whole(value, mode))))
            assert int(got) == fmt.code(want)


def test_flushing_and_saturation() -> None:
    a = np.resize(np.array([1e-40, -1e-40, 0.25, 2.0, -1.0, np.nan, np.inf, -0.0], np.float32), 32)
    assert compute("cvt.sat.f32.f32 {out}, {a};", [a], np.float32)[:8].tolist() == [
        np.float32(1e-40),
        0,
        0.25,
        1,
        0,
        0,
        1,
        0,
    ]
    assert compute("cvt.ftz.sat.f32.f32 {out}, {a};", [a], np.float32)[0] == 0
    assert compute("cvt.rn.sat.f16.f32 {out}, {a};", [a], np.uint16)[:8].tolist() == [
        0,
        0,
        0x3400,
        0x3C00,
        0,
        0,
        0x3C00,
        0,
    ]
    small = np.resize(np.array([1e-39, 5e-324, -1e-310], np.float64), 32)
    assert compute("cvt.rn.ftz.f32.f64 {out}, {a};", [small], np.uint32)[:3].tolist() == [0, 0, 0x80000000]
    assert compute("cvt.rpi.ftz.s32.f32 {out}, {a};", [a], np.int32)[0] == 0
    assert compute("cvt.rpi.s32.f32 {out}, {a};", [a], np.int32)[0] == 1
    assert compute("cvt.ftz.f64.f32 {out}, {a};", [a], np.float64)[0] == 0


def test_stochastic_rounding_adds_the_random_bits() -> None:
    a, b = np.full(32, 1 + 2.0**-11 * 1.5, np.float32), np.full(32, 1.0, np.float32)
    random = (np.arange(32, dtype=np.uint32) << 8) << 16
    found = compute("cvt.rs.f16x2.f32 {out}, {a}, {b}, {c};", [a, b, random], np.uint32)
    # Three quarters of a step are cut off, so that a quarter of the 13 bits carries.
    assert (found >> 16).tolist() == [0x3C01 if 0.75 + 256 * n / 8192 >= 1 else 0x3C00 for n in range(32)]
    assert set((found & 0xFFFF).tolist()) == {0x3C00}
    x = np.full(32, 1.25, np.float32)
    text = "cvt.rs.satfinite.e2m1x4.f32 {out}, {{{a}, {a}, {a}, {a}}}, {b};".replace("{{", "{").replace("}}", "}")
    bits = np.resize(np.array([0x00000000, 0xFFFFFFFF, 0x80008000, 0x00800080], np.uint32), 32)
    assert compute(text, [x, bits], np.uint16)[:4].tolist() == [0x2222, 0x3333, 0x3322, 0x2233]


def test_pairs_of_integers_pack() -> None:
    a = np.resize(np.array([70000, -70000, 5, 200, -3], np.int32), 32)
    b = a[::-1].copy()
    found = compute("cvt.pack.sat.s16.s32 {out}, {a}, {b};", [a.view(np.uint32), b.view(np.uint32)], np.uint32)
    want = [
        (int(np.clip(x, -32768, 32767)) & 0xFFFF) << 16 | int(np.clip(y, -32768, 32767)) & 0xFFFF
        for x, y in zip(a, b, strict=True)
    ]
    assert found.tolist() == want
    found = compute(
        "cvt.pack.sat.u8.s32.b32 {out}, {a}, {b}, 0x1234;", [a.view(np.uint32), b.view(np.uint32)], np.uint32
    )
    assert found.tolist() == [
        0x12340000 | int(np.clip(x, 0, 255)) << 8 | int(np.clip(y, 0, 255)) for x, y in zip(a, b, strict=True)
    ]
