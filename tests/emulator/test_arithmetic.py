"""Each form of the arithmetic instructions against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from micro import compute

RANDOM = np.random.default_rng(7)
INTEGER_TYPES = {
    "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64
}  # fmt: skip
Binary = Callable[[int, int], int]


def integers(kind: str) -> np.ndarray:
    """Random bits with the corners among them."""
    dtype = INTEGER_TYPES[kind]
    info = np.iinfo(dtype)
    values = RANDOM.integers(info.min, info.max, 32, dtype=dtype, endpoint=True)
    values[:6] = [info.min, info.max, 0, 1, info.max // 2, info.min + 1]
    return RANDOM.permutation(values)


def wrap(value: int, kind: str) -> int:
    bits = 8 * np.dtype(INTEGER_TYPES[kind]).itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def bits_of(kind: str) -> int:
    return 8 * np.dtype(INTEGER_TYPES[kind]).itemsize


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY: dict[str, Binary] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
}


@pytest.mark.parametrize("kind", INTEGER_TYPES)
@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str, kind: str) -> None:
    a, b = integers(kind), integers(kind)
    if op in ("div", "rem"):
        b[b == 0] = 3
    found = compute(f"{op}.{kind} {{out}}, {{a}}, {{b}};", [a, b], INTEGER_TYPES[kind])
    assert found.tolist() == [wrap(BINARY[op](int(x), int(y)), kind) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_high_half_of_products(kind: str) -> None:
    a, b = integers(kind), integers(kind)
    found = compute(f"mul.hi.{kind} {{out}}, {{a}}, {{b}};", [a, b], INTEGER_TYPES[kind])
    assert found.tolist() == [int(x) * int(y) >> bits_of(kind) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(("kind", "wide"), [("u16", "u32"), ("s16", "s32"), ("u32", "u64"), ("s32", "s64")])
def test_wide_products(kind: str, wide: str) -> None:
    a, b, c = integers(kind), integers(kind), integers(wide)
    found = compute(f"mad.wide.{kind} {{out}}, {{a}}, {{b}}, {{c}};", [a, b, c], INTEGER_TYPES[wide])
    assert found.tolist() == [wrap(int(x) * int(y) + int(z), wide) for x, y, z in zip(a, b, c, strict=True)]


@pytest.mark.parametrize("kind", INTEGER_TYPES)
@pytest.mark.parametrize("op", ["shl", "shr"])
def test_shifts_clamp(op: str, kind: str) -> None:
    bits = bits_of(kind)
    a, b = integers(kind), RANDOM.integers(0, 2 * bits, 32, dtype=np.uint32)
    b[:3] = [bits, bits - 1, 2**32 - 1]
    suffix = f"b{bits}" if op == "shl" else kind
    found = compute(f"{op}.{suffix} {{out}}, {{a}}, {{b}};", [a, b], INTEGER_TYPES[kind])
    want = [
        wrap(int(x) << min(int(y), bits) if op == "shl" else int(x) >> min(int(y), bits), kind)
        for x, y in zip(a, b, strict=True)
    ]
    assert found.tolist() == want


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("op", ["and", "or", "xor"])
def test_logic(op: str, bits: int) -> None:
    a, b = integers(f"u{bits}"), integers(f"u{bits}")
    found = compute(f"{op}.b{bits} {{out}}, {{a}}, {{b}};", [a, b], INTEGER_TYPES[f"u{bits}"])
    assert np.array_equal(found, {"and": a & b, "or": a | b, "xor": a ^ b}[op])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("popc.b32 {out}, {a};", lambda a: a.bit_count()),
        ("clz.b32 {out}, {a};", lambda a: 32 - a.bit_length()),
        ("brev.b32 {out}, {a};", lambda a: int(f"{a:032b}"[::-1], 2)),
        ("bfind.u32 {out}, {a};", lambda a: (a.bit_length() - 1) % 2**32),
        ("not.b32 {out}, {a};", lambda a: a ^ 0xFFFFFFFF),
        ("neg.s32 {out}, {a};", lambda a: -a % 2**32),
        ("bfe.u32 {out}, {a}, 5, 9;", lambda a: a >> 5 & 511),
        ("bfe.s32 {out}, {a}, 28, 8;", lambda a: ((a >> 28) - (16 if a >> 31 else 0)) % 2**32),
        ("bfe.u32 {out}, {a}, 30, 8;", lambda a: a >> 30),
        ("bfi.b32 {out}, {a}, 0xffff0000, 4, 6;", lambda a: 0xFFFF0000 | (a & 63) << 4),
        ("shf.l.wrap.b32 {out}, {a}, {a}, 9;", lambda a: (a << 9 | a >> 23) % 2**32),
        ("shf.r.clamp.b32 {out}, {a}, 7, 40;", lambda a: 7),
        ("prmt.b32 {out}, {a}, 0, 0x0123;", lambda a: int.from_bytes(a.to_bytes(4, "little"), "big")),
        ("prmt.b32 {out}, {a}, 0x11223344, 0x7b40;", None),
        ("lop3.b32 {out}, {a}, 0xff00ff00, 0x0f0f0f0f, 0xca;", lambda a: (a & 0xFF00FF00) | (~a & 0x0F0F0F0F)),
        ("dp4a.u32.u32 {out}, {a}, 0x04030201, 5;", lambda a: 5 + sum((n + 1) * (a >> 8 * n & 255) for n in range(4))),
        ("dp2a.lo.u32.s32 {out}, {a}, 0x0000ff02, 0;", lambda a: (2 * (a & 0xFFFF) - (a >> 16)) % 2**32),
        ("mov.b32 {%h1, %h2}, {a}; mov.b32 {out}, {%h2, %h1};", lambda a: (a << 16 | a >> 16) % 2**32),
        ("abs.s32 {out}, {a};", lambda a: abs(a - (2**32 if a >> 31 else 0)) % 2**32),
    ],
)
def test_bit_tricks(text: str, want: Callable[[int], int] | None) -> None:
    a = integers("u32")
    if want is None:

        def want(x: int) -> int:
            # Bytes from the top: 0x11, the sign of byte 3 of a, 0x44, byte 0 of a.
            return 0x11000000 | (0xFF0000 if x >> 31 else 0) | 0x4400 | x & 0xFF

    assert compute(text, [a], np.uint32).tolist() == [want(int(x)) for x in a]


@pytest.mark.parametrize("kind", INTEGER_TYPES)
@pytest.mark.parametrize("compare", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(compare: str, kind: str) -> None:
    a, b = integers(kind), integers(kind)
    b[::3] = a[::3]
    found = compute(
        f"setp.{compare}.{kind} %p1|%p2, {{a}}, {{b}};\n"
        "selp.u32 %r90, 1, 0, %p1; selp.u32 %r91, 2, 0, %p2; or.b32 {out}, %r90, %r91;",
        [a, b],
        np.uint32,
    )
    want = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[compare]
    assert found.tolist() == np.where(want, 1, 2).tolist()


# ---- floats ----


def floats() -> np.ndarray:
    values = (RANDOM.standard_normal(32) * 10.0 ** RANDOM.integers(-8, 8, 32)).astype(np.float32)
    values[:7] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1.5]
    return RANDOM.permutation(values)


def same(found: np.ndarray, want: np.ndarray, ulps: int = 0) -> None:
    """Equal to the bit but for NaN, or to some ulps."""
    assert np.array_equal(np.isnan(found), np.isnan(want))
    ok = ~np.isnan(want)
    if ulps == 0:
        assert np.array_equal(found[ok].view(np.uint32), want[ok].astype(np.float32).view(np.uint32))
    else:
        np.testing.assert_allclose(found[ok], want[ok], rtol=ulps * 2.0**-23, atol=1e-38)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div.rn", "min", "max"])
def test_f32(op: str) -> None:
    a, b = floats(), floats()
    with np.errstate(all="ignore"):
        want = {
            "add": a + b, "sub": a - b, "mul": a * b, "div.rn": a / b, "min": np.fmin(a, b), "max": np.fmax(a, b)
        }[op]  # fmt: skip
        zeros = (a == 0) & (b == 0)
        found = compute(f"{op}.f32 {{out}}, {{a}}, {{b}};", [a, b], np.float32)
    same(np.where(zeros, abs(found), found), np.where(zeros, abs(want), want).astype(np.float32))


def test_fma_rounds_once() -> None:
    a, b, c = (RANDOM.standard_normal(32).astype(np.float32) for _ in range(3))
    exact = (a.astype(np.longdouble) * b + c).astype(np.float32)
    same(compute("fma.rn.f32 {out}, {a}, {b}, {c};", [a, b, c], np.float32), exact)
    # The product is rounded first where two instructions say so.
    same(compute("mul.f32 {out}, {a}, {b}; add.f32 {out}, {out}, {c};", [a, b, c], np.float32), a * b + c)


@pytest.mark.parametrize(
    ("text", "want", "ulps"),
    [
        ("ex2.approx.ftz.f32", np.exp2, 2),
        ("lg2.approx.f32", np.log2, 2),
        ("rcp.rn.f32", lambda a: np.float32(1) / a, 0),
        ("sqrt.rn.f32", np.sqrt, 0),
        ("neg.f32", lambda a: -a, 0),
        ("abs.f32", np.abs, 0),
    ],
)
def test_f32_functions(text: str, want: Callable[[np.ndarray], np.ndarray], ulps: int) -> None:
    a = floats()
    with np.errstate(all="ignore"):
        same(compute(f"{text} {{out}}, {{a}};", [a], np.float32), want(a).astype(np.float32), ulps)


@pytest.mark.parametrize(
    ("compare", "want"),
    [
        ("lt", lambda a, b: a < b),
        ("geu", lambda a, b: ~(a < b)),
        ("ne", lambda a, b: (a < b) | (a > b)),
        ("neu", lambda a, b: a != b),
        ("equ", lambda a, b: ~((a < b) | (a > b))),
        ("num", lambda a, b: ~(np.isnan(a) | np.isnan(b))),
        ("nan", lambda a, b: np.isnan(a) | np.isnan(b)),
    ],
)
def test_f32_comparisons(compare: str, want: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    a, b = floats(), floats()
    found = compute(f"setp.{compare}.f32 %p1, {{a}}, {{b}}; selp.u32 {{out}}, 1, 0, %p1;", [a, b], np.uint32)
    assert found.tolist() == want(a, b).astype(int).tolist()


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_f16_pairs(op: str) -> None:
    a, b = (RANDOM.standard_normal(64).astype(np.float16) for _ in range(2))
    want = {"add": a + b, "sub": a - b, "mul": a * b}[op]
    found = compute(f"{op}.f16x2 {{out}}, {{a}}, {{b}};", [a.view(np.uint32), b.view(np.uint32)], np.uint32)
    assert np.array_equal(found.view(np.float16), want)


def test_f16_fma_rounds_once() -> None:
    a, b, c = (RANDOM.standard_normal(32).astype(np.float16) for _ in range(3))
    want = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)
    found = compute("fma.rn.f16 {out}, {a}, {b}, {c};", [x.view(np.uint16) for x in (a, b, c)], np.uint16)
    assert np.array_equal(found.view(np.float16), want)
