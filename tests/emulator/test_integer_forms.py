"""Integer and bit instructions beyond the plain ones, and comparisons that give numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from micro import compute

RANDOM = np.random.default_rng(29)
TYPES = {
    "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64
}  # fmt: skip
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
Lane = Callable[..., int]


def numbers(kind: str, count: int = 64) -> np.ndarray:
    info = np.iinfo(TYPES[kind])
    values = RANDOM.integers(info.min, info.max, count, dtype=TYPES[kind], endpoint=True)
    values[:7] = [info.min, info.max, 0, 1, info.max // 2, info.min + 1, info.max - 1]
    values[7:20] = RANDOM.integers(0, 40, 13)
    return RANDOM.permutation(values)


def lanes(text: str, kinds: str, want: Lane, result: str = "u32") -> None:
    """`want` of Python integers, one operand per kind, wraps to the result's type."""
    sources = [numbers(kind) for kind in kinds.split()]
    names = ", ".join("{" + "abcd"[n] + "}" for n in range(len(sources)))
    text = text if "{" in text else f"{text} {{out}}, {names};"
    found = compute(text, sources, TYPES[result])
    dtype = TYPES["u" + result[1:]]
    mask = (1 << 8 * np.dtype(dtype).itemsize) - 1
    for got, *operands in zip(found.view(dtype), *sources, strict=True):
        expected = want(*(int(x) for x in operands)) & mask
        assert int(got) == expected, (text, operands, hex(int(got)), hex(expected))


def clamp32(value: int) -> int:
    return min(max(value, -(2**31)), 2**31 - 1)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def nth_set(mask: int, base: int, offset: int) -> int:
    if base > 31:
        return M32
    if offset == 0:
        return base if mask >> base & 1 else M32
    places = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [n for n in places if mask >> n & 1]
    return found[abs(offset) - 1] if len(found) >= abs(offset) else M32


def bit_field(start: int, count: int) -> int:
    return 0 if start > 31 else ((1 << min(count, 32)) - 1) << start


def sign_extended(a: int, count: int, *, is_signed: bool) -> int:
    if count == 0:
        return 0
    return signed(a, count) if is_signed else a & ((1 << count) - 1)


FORMS: list[tuple[str, str, Lane, str]] = [
    ("add.sat.s32", "s32 s32", lambda a, b: clamp32(a + b), "s32"),
    ("sub.sat.s32", "s32 s32", lambda a, b: clamp32(a - b), "s32"),
    ("mad.hi.sat.s32", "s32 s32 s32", lambda a, b, c: clamp32((a * b >> 32) + c), "s32"),
    ("mul24.lo.u32", "u32 u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF), "u32"),
    ("mul24.hi.u32", "u32 u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16, "u32"),
    ("mul24.lo.s32", "s32 s32", lambda a, b: signed(a, 24) * signed(b, 24), "s32"),
    ("mul24.hi.s32", "s32 s32", lambda a, b: signed(a, 24) * signed(b, 24) >> 16, "s32"),
    ("mad24.lo.s32", "s32 s32 s32", lambda a, b, c: signed(a, 24) * signed(b, 24) + c, "s32"),
    ("fns.b32 {out}, {a}, {b}, 3;", "u32 u32", lambda a, b: nth_set(a, b, 3), "u32"),
    ("and.b32 %r8, {b}, 31; fns.b32 {out}, {a}, %r8, -2;", "u32 u32", lambda a, b: nth_set(a, b & 31, -2), "u32"),
    ("and.b32 %r8, {b}, 31; fns.b32 {out}, {a}, %r8, 0;", "u32 u32", lambda a, b: nth_set(a, b & 31, 0), "u32"),
    ("bmsk.clamp.b32", "u32 u32", bit_field, "u32"),
    ("bmsk.wrap.b32", "u32 u32", lambda a, b: bit_field(a & 31, b & 31), "u32"),
    ("szext.clamp.u32", "u32 u32", lambda a, b: sign_extended(a, min(b, 32), is_signed=False), "u32"),
    ("szext.wrap.u32", "u32 u32", lambda a, b: sign_extended(a, b & 31, is_signed=False), "u32"),
    ("szext.clamp.s32", "u32 u32", lambda a, b: sign_extended(a, min(b, 32), is_signed=True), "u32"),
    ("szext.wrap.s32", "u32 u32", lambda a, b: sign_extended(a, b & 31, is_signed=True), "u32"),
    ("bfind.shiftamt.u32", "u32", lambda a: 32 - a.bit_length() if a else M32, "u32"),
    ("bfind.shiftamt.s32", "s32", lambda a: 32 - max(a, ~a).bit_length() if a not in (0, -1) else M32, "u32"),
    ("bfind.shiftamt.u64", "u64", lambda a: 64 - a.bit_length() if a else M32, "u32"),
    ("bfind.s64", "s64", lambda a: ((a if a >= 0 else ~a).bit_length() - 1), "u32"),
    ("bfind.s32", "s32", lambda a: ((a if a >= 0 else ~a).bit_length() - 1), "u32"),
    ("popc.b64", "u64", lambda a: a.bit_count(), "u32"),
    ("clz.b64", "u64", lambda a: 64 - a.bit_length(), "u32"),
    ("brev.b64", "u64", lambda a: int(f"{a:064b}"[::-1], 2), "u64"),
    ("vabsdiff4.u32.u32.u32", "u32 u32 u32", lambda a, b, c: sum(
        abs((a >> s & 255) - (b >> s & 255)) << s for s in (0, 8, 16, 24)), "u32"),
    ("vabsdiff4.u32.u32.u32.add", "u32 u32 u32", lambda a, b, c: c + sum(
        abs((a >> s & 255) - (b >> s & 255)) for s in (0, 8, 16, 24)), "u32"),
    ("min.relu.s32", "s32 s32", lambda a, b: max(min(a, b), 0), "s32"),
    ("max.s32.relu", "s32 s32", lambda a, b: max(a, b, 0), "s32"),
    ("dp4a.s32.s32", "u32 u32 u32", lambda a, b, c: c + sum(
        signed(a >> s, 8) * signed(b >> s, 8) for s in (0, 8, 16, 24)), "u32"),
    ("dp4a.s32.u32", "u32 u32 u32", lambda a, b, c: c + sum(
        signed(a >> s, 8) * (b >> s & 255) for s in (0, 8, 16, 24)), "u32"),
    ("dp2a.hi.s32.u32", "u32 u32 u32", lambda a, b, c: c + sum(
        signed(a >> 16 * n, 16) * (b >> 16 + 8 * n & 255) for n in range(2)), "u32"),
    *((f"{op}.b{bits}", f"u{bits}", {"cnot": lambda a: int(a == 0), "not": lambda a: ~a}[op], f"u{bits}")
      for op, bits in product(("cnot", "not"), (16, 32, 64))),
    *((f"sad.{kind}", f"{kind} {kind} {kind}", lambda a, b, c: c + abs(a - b), kind) for kind in TYPES),
    *((f"mad.hi.{kind}", f"{kind} {kind} {kind}",
       lambda a, b, c, bits=int(kind[1:]): (a * b >> bits) + c, kind) for kind in TYPES),
    *((f"mad.lo.{kind}", f"{kind} {kind} {kind}", lambda a, b, c: a * b + c, kind) for kind in TYPES),
    *((f"abs.{kind}", kind, abs, kind) for kind in ("s16", "s32", "s64")),
    *((f"neg.{kind}", kind, lambda a: -a, kind) for kind in ("s16", "s32", "s64")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kinds", "want", "result"), FORMS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_forms(text: str, kinds: str, want: Lane, result: str) -> None:
    lanes(text, kinds, want, result)


@pytest.mark.parametrize("kind", TYPES)
def test_division_by_minus_one_and_zero(kind: str) -> None:
    info = np.iinfo(TYPES[kind])
    a = np.resize(np.array([info.min, info.max, 5, 0], TYPES[kind]), 32)
    ones = np.full(32, -1 if info.min < 0 else info.max, TYPES[kind])
    for op, want in (("div", [info.min, -info.max, -5, 0]), ("rem", [0, 0, 0, 0])):
        if info.min < 0:
            assert compute(f"{op}.{kind} {{out}}, {{a}}, {{b}};", [a, ones], TYPES[kind])[:4].tolist() == want
    zero = np.zeros(32, TYPES[kind])
    assert (
        compute(f"div.{kind} {{out}}, {{a}}, {{b}};", [a, zero], TYPES["u" + kind[1:]])[0]
        == np.iinfo("u" + np.dtype(TYPES[kind]).name.lstrip("u")).max
    )
    found = compute(f"rem.{kind} {{out}}, {{a}}, {{b}};", [a, zero], TYPES[kind])
    assert (found == np.array(-1).astype(TYPES[kind])).all()


def prmt(mode: str, a: int, b: int, n: int) -> int:
    order = {
        "f4e": [n, n + 1, n + 2, n + 3], "b4e": [n, (n - 1) % 8, (n - 2) % 8, (n - 3) % 8], "rc8": [n] * 4,
        "ecl": [max(k, n) for k in range(4)], "ecr": [min(k, n) for k in range(4)],
        "rc16": [n % 2 * 2, n % 2 * 2 + 1] * 2,
    }[mode]  # fmt: skip
    data = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(data[k] for k in order), "little")


@pytest.mark.parametrize("mode", ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"])
def test_modes_of_prmt(mode: str) -> None:
    lanes(f"prmt.b32.{mode} {{out}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", lambda a, b, c: prmt(mode, a, b, c & 3))


def test_prmt_copies_signs() -> None:
    def want(a: int, b: int, c: int) -> int:
        data = (b << 32 | a).to_bytes(8, "little")
        picks = [(data[c >> 4 * n & 7], c >> 4 * n & 8) for n in range(4)]
        return int.from_bytes(bytes((255 if byte >> 7 else 0) if sign else byte for byte, sign in picks), "little")

    lanes("prmt.b32", "u32 u32 u32", want)


@pytest.mark.parametrize("table", [0x00, 0xFF, 0x96, 0xE8, 0xCA, 0x01, 0x80, 0x2D])
def test_every_function_of_three_bits(table: int) -> None:
    def want(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32))

    lanes(f"lop3.b32 {{out}}, {{a}}, {{b}}, {{c}}, {table};", "u32 u32 u32", want)
    test = "setp.gt.u32 %p2, {c}, 20; lop3"
    text = f"{test}.and.b32 {{out}}|%p1, {{a}}, {{b}}, {{c}}, {table}, %p2; @%p1 mov.u32 {{out}}, 77;"
    lanes(text, "u32 u32 u32", lambda a, b, c: 77 if c > 20 and want(a, b, c) else want(a, b, c))
    text = f"{test}.or.b32 _|%p1, {{a}}, {{b}}, {{c}}, {table}, %p2; selp.u32 {{out}}, 1, 2, %p1;"
    lanes(text, "u32 u32 u32", lambda a, b, c: 1 if c > 20 or want(a, b, c) else 2)


def test_funnel_shifts() -> None:
    for side, mode in product("lr", ("wrap", "clamp")):

        def want(a: int, b: int, c: int, side: str = side, mode: str = mode) -> int:
            n = c & 31 if mode == "wrap" else min(c, 32)
            return (b << 32 | a) << n >> 32 if side == "l" else (b << 32 | a) >> n

        lanes(f"shf.{side}.{mode}.b32", "u32 u32 u32", want)


@pytest.mark.parametrize("bits", [32, 64])
def test_fields(bits: int) -> None:
    def insert(a: int, b: int, c: int, d: int) -> int:
        position, length = c & 255, d & 255
        mask = ((1 << length) - 1) << position & ((1 << bits) - 1)
        return (b & ~mask) | (a << position & mask)

    lanes(f"bfi.b{bits}", f"u{bits} u{bits} u32 u32", insert, f"u{bits}")
    for sign in "us":

        def extract(a: int, c: int, d: int, sign: str = sign) -> int:
            # Above the source stand copies of the field's sign, which is never beyond its top bit.
            position, length = c & 255, d & 255
            if length == 0:
                return 0
            top = min(position + length - 1, bits - 1)
            fill = sign == "s" and (a >> top & 1)
            value = a & ((1 << bits) - 1)
            out = (value >> position & ((1 << length) - 1)) if position < bits else 0
            have = max(min(length, bits - position), 0)
            return out | (~((1 << have) - 1) if fill else 0)

        lanes(f"bfe.{sign}{bits}", f"{sign}{bits} u32 u32", extract, f"{sign}{bits}")


def halves(a: int) -> tuple[int, int]:
    return a >> 16, a & 0xFFFF


@pytest.mark.parametrize("op", ["add", "min", "max"])
@pytest.mark.parametrize("sign", "us")
def test_pairs_of_16_bit_integers(op: str, sign: str) -> None:
    def one(a: int, b: int) -> int:
        if sign == "s":
            a, b = signed(a, 16), signed(b, 16)
        return {"add": a + b, "min": min(a, b), "max": max(a, b)}[op]

    def want(a: int, b: int) -> int:
        high, low = (one(x, y) & 0xFFFF for x, y in zip(halves(a), halves(b), strict=True))
        return high << 16 | low

    lanes(f"{op}.{sign}16x2", "u32 u32", want)
    if (op, sign) == ("max", "s"):
        lanes(f"{op}.s16x2.relu", "u32 u32", lambda a, b: want(a, b) & sum(
            0xFFFF << 16 * n for n in range(2) if not want(a, b) >> 16 * n + 15 & 1))  # fmt: skip


# ---- carries --------------------------------------------------------------------------------------------------------


def test_128_bit_sums_and_differences() -> None:
    a, b, c, d = (numbers("u64") for _ in range(4))
    for op, sign in (("add", 1), ("sub", -1)):
        body = f"{op}.cc.u64 {{out}}, {{a}}, {{b}}; {op}c.cc.u64 %d50, {{c}}, {{d}}; {op}c.u64 %d51, 0, 0;"
        totals = [
            (int(z) << 64 | int(x)) + sign * (int(w) << 64 | int(y)) for x, y, z, w in zip(a, b, c, d, strict=True)
        ]
        for register, shift in (("{out}", 0), ("%d50", 64), ("%d51", 128)):
            found = compute(f"{body} mov.u64 {{out}}, {register};", [a, b, c, d], np.uint64)
            assert found.tolist() == [total >> shift & M64 for total in totals]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", "us")
def test_products_with_carries(bits: int, sign: str) -> None:
    kind, r = f"{sign}{bits}", "%r" if bits == 32 else "%d"
    a, b, c, d = (numbers(kind) for _ in range(4))
    body = f"mad.lo.cc.{kind} {{out}}, {{a}}, {{b}}, {{c}}; madc.hi.{kind} {r}60, {{a}}, {{b}}, {{d}};"
    mask = (1 << bits) - 1
    totals = [
        int(x) * int(y) + ((int(w) & mask) << bits) + (int(z) & mask) for x, y, z, w in zip(a, b, c, d, strict=True)
    ]
    unsigned = TYPES[f"u{bits}"]
    low = compute(body, [a, b, c, d], unsigned)
    high = compute(f"{body} mov.b{bits} {{out}}, {r}60;", [a, b, c, d], unsigned)
    assert [int(h) << bits | int(x) for x, h in zip(low, high, strict=True)] == [
        total & (1 << 2 * bits) - 1 for total in totals
    ]


# ---- comparisons ----------------------------------------------------------------------------------------------------

# Both predicates as a number.
BOTH = " selp.u32 %r9, 1, 0, %p1; selp.u32 {out}, 2, 0, %p2; or.b32 {out}, {out}, %r9;"
COMPARES: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a < b or a > b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "equ": lambda a, b: not (a < b or a > b),
    "neu": lambda a, b: a != b, "ltu": lambda a, b: not a >= b, "leu": lambda a, b: not a > b,
    "gtu": lambda a, b: not a <= b, "geu": lambda a, b: not a < b,
    "num": lambda a, b: not (math.isnan(a) or math.isnan(b)), "nan": lambda a, b: math.isnan(a) or math.isnan(b),
}  # fmt: skip


def float_pairs(dtype: type) -> tuple[np.ndarray, np.ndarray]:
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.5, 6e-8], dtype)
    return np.repeat(special, 8), np.tile(special, 8)


@pytest.mark.parametrize("compare", COMPARES)
def test_all_comparisons_of_floats(compare: str) -> None:
    for kind, dtype, bits in (
        ("f16", np.float16, np.uint16),
        ("f32", np.float32, np.uint32),
        ("f64", np.float64, np.uint64),
    ):
        a, b = float_pairs(dtype)
        text = f"setp.{compare}.{kind} %p1|%p2, {{a}}, {{b}};{BOTH}"
        want = [1 if COMPARES[compare](float(x), float(y)) else 2 for x, y in zip(a, b, strict=True)]
        assert compute(text, [a.view(bits), b.view(bits)], np.uint32).tolist() == want
    a, b = float_pairs(np.float32)
    brain = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    values = [(x.astype(np.uint32) << 16).view(np.float32) for x in brain]
    want = [int(COMPARES[compare](float(x), float(y))) for x, y in zip(*values, strict=True)]
    assert (
        compute(f"setp.{compare}.bf16 %p1, {{a}}, {{b}}; selp.u32 {{out}}, 1, 0, %p1;", brain, np.uint32).tolist()
        == want
    )


@pytest.mark.parametrize("boolean", ["and", "or", "xor"])
def test_comparisons_combine_with_a_predicate(boolean: str) -> None:
    combine = {"and": lambda x, y: x and y, "or": lambda x, y: x or y, "xor": lambda x, y: x != y}[boolean]
    for kind in ("u32", "s32", "u16", "f32", "f16"):
        bits = "u16" if kind[1:] == "16" else "u32"
        a, b = numbers(bits), numbers(bits)
        text = f"setp.lt.u32 %p3, %r0, 17; setp.ge.{boolean}.{kind} %p1|%p2, {{a}}, {{b}}, !%p3;{BOTH}"
        typed = {"f32": np.float32, "f16": np.float16, "s32": np.int32}.get(kind, TYPES[bits])
        holds = [bool(x >= y) for x, y in zip(a.view(typed), b.view(typed), strict=True)]
        third = [lane >= 17 for lane in range(64)]
        want = [int(combine(h, t)) + 2 * int(combine(not h, t)) for h, t in zip(holds, third, strict=True)]
        assert compute(text, [a, b], np.uint32).tolist() == want, kind


def test_comparisons_of_pairs_of_halves() -> None:
    a, b = (np.resize(x, 128) for x in float_pairs(np.float16))
    text = (
        "setp.lt.f16x2 %p1|%p2, {a}, {b}; selp.u32 %r9, 1, 0, %p1; selp.u32 {out}, 2, 0, %p2; or.b32 {out}, {out}, %r9;"
    )
    found = compute(text, [a.view(np.uint32), b.view(np.uint32)], np.uint32)
    less = a < b
    assert found.tolist() == [int(less[2 * n]) + 2 * int(less[2 * n + 1]) for n in range(64)]
    ones = compute("set.lt.f16x2.f16x2 {out}, {a}, {b};", [a.view(np.uint32), b.view(np.uint32)], np.uint32)
    assert np.array_equal(ones.view(np.float16), less.astype(np.float16))
    masks = compute("set.lt.u32.f16x2 {out}, {a}, {b};", [a.view(np.uint32), b.view(np.uint32)], np.uint32)
    assert np.array_equal(masks.view(np.uint16), np.where(less, 0xFFFF, 0).astype(np.uint16))


def test_subnormals_are_zero_where_that_is_asked_for() -> None:
    a = np.resize(np.array([1e-40, -1e-40, 1.0], np.float32), 32)
    for ftz, want in (("", [1, 0, 1]), (".ftz", [0, 0, 1])):
        assert (
            compute(f"setp.gt{ftz}.f32 %p1, {{a}}, 0f00000000; selp.u32 {{out}}, 1, 0, %p1;", [a], np.uint32)[
                :3
            ].tolist()
            == want
        )


@pytest.mark.parametrize(("to", "one"), [("u32", M32), ("s32", M32), ("f32", 0x3F800000)])
@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64", "u16", "s16", "f32", "f64"])
def test_set(to: str, one: int, kind: str) -> None:
    bits = int(kind[1:])
    a, b = numbers(f"u{bits}"), numbers(f"u{bits}")
    typed = {"f32": np.float32, "f64": np.float64}.get(kind) or TYPES[kind]
    want = [one if x < y else 0 for x, y in zip(a.view(typed), b.view(typed), strict=True)]
    assert compute(f"set.lt.{to}.{kind} {{out}}, {{a}}, {{b}};", [a, b], np.uint32).tolist() == want


def test_slct() -> None:
    c = np.resize(np.array([0.0, -0.0, -1.0, 2.0, np.nan, -1e-40], np.float32), 64)
    a, b = numbers("u64"), numbers("u64")
    for ftz, flips in (("", 6), (".ftz", 5)):
        found = compute(f"slct{ftz}.u64.f32 {{out}}, {{a}}, {{b}}, {{c}};", [a, b, c], np.uint64)
        keeps = [n % 6 in (0, 1, 3) or n % 6 >= flips for n in range(64)]
        assert found.tolist() == [int(x if keep else y) for x, y, keep in zip(a, b, keeps, strict=True)]
    lanes("slct.b32.s32", "u32 u32 s32", lambda a, b, c: a if c >= 0 else b)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_selection(bits: int) -> None:
    text = f"setp.lt.u32 %p1, %r0, 9; selp.b{bits} {{out}}, {{a}}, {{b}}, !%p1;"
    a, b = numbers(f"u{bits}"), numbers(f"u{bits}")
    found = compute(text, [a, b], TYPES[f"u{bits}"])
    assert np.array_equal(found, np.where(np.arange(64) < 9, b, a))


@pytest.mark.parametrize(("to", "source"), list(product([f"{s}{b}" for s in "us" for b in (8, 16, 32, 64)], repeat=2)))
def test_integer_widths(to: str, source: str) -> None:
    bits, width = int(source[1:]), int(to[1:])
    register, result = f"u{max(bits, 16)}", f"u{max(width, 16)}"
    values = numbers(register)
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if to[0] == "s" else (0, (1 << width) - 1)
    for saturate in ("", ".sat"):
        found = compute(f"cvt{saturate}.{to}.{source} {{out}}, {{a}};", [values], TYPES[result])
        for x, got in zip(values, found, strict=True):
            value = signed(int(x), bits) if source[0] == "s" else int(x) & ((1 << bits) - 1)
            want = (
                min(max(value, low), high)
                if saturate
                else signed(value, width)
                if to[0] == "s"
                else value & ((1 << width) - 1)
            )
            assert int(got) == want & ((1 << max(width, 16)) - 1)
