"""Arithmetic of all float types and rounding modes against exact arithmetic, corners among the operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import exact
import numpy as np
import pytest
from exact import FORMATS, Format, Number
from micro import compute

RANDOM = np.random.default_rng(17)
UINTS = {16: np.uint16, 32: np.uint32, 64: np.uint64}
EXACT: dict[str, Callable[..., Number]] = {
    "add": lambda mode, a, b: exact.add(a, b, mode),
    "sub": lambda mode, a, b: exact.add(a, exact.negative(b), mode),
    "mul": lambda mode, a, b: exact.multiply(a, b),
    "div": lambda mode, a, b: exact.divide(a, b),
    "rcp": lambda mode, a: exact.divide((0, Fraction(1)), a),
    "fma": lambda mode, a, b, c: exact.add(exact.multiply(a, b), c, mode),
}
SOURCES = {"rcp": 1, "fma": 3}


def codes(fmt: Format, count: int) -> np.ndarray:
    """Random numbers of near and far exponents with all corners: zeros, infinities, NaN, subnormals, the largest."""
    sign = 1 << (fmt.bits - 1)
    middle = fmt.bias << fmt.mantissa
    near = RANDOM.integers(middle - (6 << fmt.mantissa), middle + (6 << fmt.mantissa), count)
    wide = RANDOM.integers(0, fmt.largest, count)
    values = [int(x) for x in np.where(RANDOM.random(count) < 0.7, near, wide)]
    least = 1 << fmt.mantissa
    infinity = fmt.largest + 1
    corners = [0, sign, fmt.largest, fmt.largest | sign, infinity, infinity | sign, fmt.nan, 1, sign | 1]
    corners += [least - 1, least, middle, middle | sign, middle + 1]
    values = [value | sign * int(RANDOM.integers(2)) for value in values]
    values[: len(corners)] = corners
    return np.array([values[n] for n in RANDOM.permutation(count)], UINTS[fmt.bits])


def same(found: int, want: int, fmt: Format) -> bool:
    nan = math.isnan(exact.as_float(fmt.value(want)))
    if nan and fmt.bits == 64:
        # The sign and the payload of a double NaN are the host's.
        return math.isnan(exact.as_float(fmt.value(found)))
    return found == want


def flushed(fmt: Format, code: int) -> int:
    return code & 1 << (fmt.bits - 1) if code & (1 << (fmt.bits - 1)) - 1 < 1 << fmt.mantissa else code


def check(text: str, op: str, fmt: Format, mode: str, **how: bool) -> None:
    for _ in range(4):
        sources = [codes(fmt, 32) for _ in range(SOURCES.get(op, 2))]
        if how.get("cancel") and len(sources) > 1:
            # Sums that nearly vanish.
            sources[-1][::3] = sources[0][::3] ^ UINTS[fmt.bits](1 << (fmt.bits - 1))
        names = ", ".join("{" + "abc"[n] + "}" for n in range(len(sources)))
        found = compute(f"{text} {{out}}, {names};", sources, UINTS[fmt.bits])
        for lane, operands in enumerate(zip(*sources, strict=True)):
            given = [flushed(fmt, int(x)) if how.get("ftz") else int(x) for x in operands]
            want = fmt.code(EXACT[op](mode, *(fmt.value(x) for x in given)), mode)
            want = flushed(fmt, want) if how.get("ftz") else want
            want = saturated(fmt, want) if how.get("sat") else want
            want = relu(fmt, want) if how.get("relu") else want
            assert same(int(found[lane]), want, fmt), (text, [hex(x) for x in given], hex(int(found[lane])), hex(want))


def saturated(fmt: Format, code: int) -> int:
    value = exact.as_float(fmt.value(code))
    if math.isnan(value) or math.copysign(1, value) < 0:
        return 0
    return min(code, fmt.bias << fmt.mantissa)


def relu(fmt: Format, code: int) -> int:
    negative = code >> (fmt.bits - 1) and not math.isnan(exact.as_float(fmt.value(code)))
    return 0 if negative else code


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "div", "rcp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_modes(kind: str, op: str, mode: str) -> None:
    check(f"{op}.{mode}.{kind}", op, FORMATS[kind], mode, cancel=True)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize(("qualifiers", "how"), [
    (".rn.ftz", {"ftz": True}), (".rz.ftz", {"ftz": True}), (".rn.sat", {"sat": True}),
    (".rp.ftz.sat", {"ftz": True, "sat": True}),
])  # fmt: skip
def test_f32_flushes_and_saturates(op: str, qualifiers: str, how: dict[str, bool]) -> None:
    check(f"{op}{qualifiers}.f32", op, FORMATS["f32"], qualifiers[1:3], **how)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("op", "qualifiers", "how"), [
    ("add", "", {}), ("add", ".rn", {}), ("sub", "", {}), ("mul", "", {}), ("fma", ".rn", {}),
    ("fma", ".rn.relu", {"relu": True}),
])  # fmt: skip
def test_halves(kind: str, op: str, qualifiers: str, how: dict[str, bool]) -> None:
    check(f"{op}{qualifiers}.{kind}", op, FORMATS[kind], "rn", **how)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize(("qualifiers", "how"), [
    (".rn.ftz", {"ftz": True}), (".rn.sat", {"sat": True}), (".rn.ftz.sat", {"ftz": True, "sat": True}),
])  # fmt: skip
def test_f16_flushes_and_saturates(op: str, qualifiers: str, how: dict[str, bool]) -> None:
    check(f"{op}{qualifiers}.f16", op, FORMATS["f16"], "rn", **how)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("op", "qualifiers"), [
    ("add", ""), ("sub", ""), ("mul", ""), ("fma", ".rn"), ("fma", ".rn.relu"), ("min", ""), ("max", ""),
    ("min", ".NaN"), ("max", ".xorsign.abs"), ("neg", ""), ("abs", ""),
])  # fmt: skip
def test_a_pair_is_two_halves(kind: str, op: str, qualifiers: str) -> None:
    fmt, count = FORMATS[kind], {"fma": 3, "neg": 1, "abs": 1}.get(op, 2)
    sources = [codes(fmt, 64) for _ in range(count)]
    names = ", ".join("{" + "abc"[n] + "}" for n in range(count))
    pairs = compute(f"{op}{qualifiers}.{kind}x2 {{out}}, {names};", [x.view(np.uint32) for x in sources], np.uint32)
    for half in range(2):
        alone = compute(f"{op}{qualifiers}.{kind} {{out}}, {names};", [x[half::2].copy() for x in sources], np.uint16)
        assert np.array_equal(pairs.view(np.uint16)[half::2], alone)


def extreme(fmt: Format, op: str, values: list[int], *, nan: bool, sign_of_product: bool = False) -> int:
    """min or max as PTX has it: a number wins over NaN unless NaN propagates, and -0 < +0."""
    top = 1 << (fmt.bits - 1)
    sign = top * (sum(value >> (fmt.bits - 1) for value in values) % 2) if sign_of_product else 0
    if sign_of_product:
        values = [value & ~top for value in values]
    numbers = [value for value in values if value & ~top <= fmt.largest + 1]
    if not numbers or (nan and len(numbers) < len(values)):
        return fmt.nan
    order = {value: -(value & ~top) - 1 if value & top else value for value in numbers}
    return (min if op == "min" else max)(numbers, key=order.__getitem__) | sign


@pytest.mark.parametrize(
    ("kind", "qualifiers"), [*product(("f16", "bf16", "f32"), ("", ".NaN", ".xorsign.abs")), ("f64", "")]
)
@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes(kind: str, op: str, qualifiers: str) -> None:
    fmt = FORMATS[kind]
    a, b = codes(fmt, 32), codes(fmt, 32)
    b[::5] = a[::5] ^ UINTS[fmt.bits](1 << (fmt.bits - 1))
    found = compute(f"{op}{qualifiers}.{kind} {{out}}, {{a}}, {{b}};", [a, b], UINTS[fmt.bits])
    for x, y, got in zip(a, b, found, strict=True):
        xorsign = qualifiers == ".xorsign.abs"
        want = extreme(fmt, op, [int(x), int(y)], nan=qualifiers == ".NaN", sign_of_product=xorsign)
        if xorsign and want & ~(1 << (fmt.bits - 1)) == fmt.nan:
            want = fmt.nan
        assert same(int(got), want, fmt), (hex(x), hex(y), hex(got), hex(want))


@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes_of_three(op: str) -> None:
    fmt = FORMATS["f32"]
    sources = [codes(fmt, 32) for _ in range(3)]
    found = compute(f"{op}.f32 {{out}}, {{a}}, {{b}}, {{c}};", sources, np.uint32)
    want = [extreme(fmt, op, [int(x) for x in values], nan=False) for values in zip(*sources, strict=True)]
    assert found.tolist() == want


@pytest.mark.parametrize(
    ("text", "op", "mode"),
    [("add.rz.f32x2", "add", "rz"), ("mul.rn.f32x2", "mul", "rn"), ("fma.rn.f32x2", "fma", "rn")],
)
def test_two_f32_in_a_register(text: str, op: str, mode: str) -> None:
    fmt, count = FORMATS["f32"], SOURCES.get(op, 2)
    sources = [codes(fmt, 64) for _ in range(count)]
    names = ", ".join("{" + "abc"[n] + "}" for n in range(count))
    found = compute(f"{text} {{out}}, {names};", [x.view(np.uint64) for x in sources], np.uint64).view(np.uint32)
    for got, *values in zip(found, *sources, strict=True):
        assert int(got) == fmt.code(EXACT[op](mode, *(fmt.value(int(x)) for x in values)), mode)


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
def test_f32_sums_of_narrow_values(narrow: str) -> None:
    a, b, c = codes(FORMATS[narrow], 32), codes(FORMATS[narrow], 32), codes(FORMATS["f32"], 32)
    values = [[FORMATS[narrow].value(int(x)) for x in array] for array in (a, b)]
    thirds = [FORMATS["f32"].value(int(x)) for x in c]
    total = compute(f"add.rz.f32.{narrow} {{out}}, {{a}}, {{b}};", [a, c], np.uint32)
    assert total.tolist() == [
        FORMATS["f32"].code(exact.add(x, z, "rz"), "rz") for x, z in zip(values[0], thirds, strict=True)
    ]
    product = compute(f"fma.rn.f32.{narrow} {{out}}, {{a}}, {{b}}, {{c}};", [a, b, c], np.uint32)
    want = [exact.add(exact.multiply(x, y), z) for x, y, z in zip(*values, thirds, strict=True)]
    assert product.tolist() == [FORMATS["f32"].code(x) for x in want]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_square_roots(kind: str, mode: str) -> None:
    fmt = FORMATS[kind]
    a = codes(fmt, 32)
    found = compute(f"sqrt.{mode}.{kind} {{out}}, {{a}};", [a], UINTS[fmt.bits])
    for x, got in zip(a, found, strict=True):
        value = fmt.value(int(x))
        if isinstance(value, float) or value[1] == 0 or value[0]:
            with np.errstate(invalid="ignore"):
                root = float(np.sqrt(exact.as_float(value)))
            assert same(int(got), fmt.code(exact.of_float(root) if value != (1, 0) else (1, Fraction(0))), fmt)
            continue
        # The code and its neighbours: squares on both sides of the argument.
        low, here, high = (fmt.value(int(got) + step)[1] for step in (-1, 0, 1))  # type: ignore[index]
        exact_here = here * here == value[1]
        if mode in ("rz", "rm"):
            assert here * here <= value[1] < high * high
        elif mode == "rp":
            assert low * low < value[1] <= here * here
        else:
            assert exact_here or ((low + here) / 2) ** 2 <= value[1] <= ((here + high) / 2) ** 2


# Largest relative errors that PTX states, and that of an absolute one near 1 for lg2.
@pytest.mark.parametrize(("text", "want", "low", "high", "relative", "absolute"), [
    ("ex2.approx.f32", np.exp2, -149.0, 127.9, 2.0**-22, 2.0**-149),
    ("ex2.approx.ftz.f32", np.exp2, -125.9, 127.9, 2.0**-22, 0.0),
    ("lg2.approx.f32", np.log2, 2.0, 1e38, 2.0**-22, 0.0),
    ("lg2.approx.f32", np.log2, 0.5, 2.0, 0.0, 2.0**-22),
    ("sin.approx.f32", np.sin, -3.14, 3.14, 0.0, 2.0**-20.9),
    ("cos.approx.ftz.f32", np.cos, -3.14, 3.14, 0.0, 2.0**-20.9),
    ("tanh.approx.f32", np.tanh, -20.0, 20.0, 2.0**-10.98, 0.0),
    ("rcp.approx.f32", np.reciprocal, 1e-30, 1e30, 2.0**-23, 0.0),
    ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 1e-30, 1e30, 2.0**-22.9, 0.0),
    ("sqrt.approx.ftz.f32", np.sqrt, 1e-30, 1e30, 2.0**-22, 0.0),
])  # fmt: skip
def test_approximations(
    text: str, want: Callable[[np.ndarray], np.ndarray], low: float, high: float, relative: float, absolute: float
) -> None:
    for _ in range(30):
        a = (low * (high / low) ** RANDOM.random(32) if low > 0 else RANDOM.uniform(low, high, 32)).astype(np.float32)
        found = compute(f"{text} {{out}}, {{a}};", [a], np.float32).astype(np.float64)
        exact_ = want(a.astype(np.float64))
        assert (np.abs(found - exact_) <= relative * np.abs(exact_) + absolute).all()


def test_powers_of_two_are_exact_and_the_ends_are_right() -> None:
    whole = np.arange(-149, 128, dtype=np.float32)
    for start in range(0, len(whole), 32):
        a = np.resize(whole[start : start + 32], 32)
        assert np.array_equal(
            compute("ex2.approx.f32 {out}, {a};", [a], np.float32), np.ldexp(np.float32(1), a.astype(int))
        )
    ends = np.resize(np.array([np.inf, -np.inf, np.nan, 128, 1000, -151, -1e30, 0.0, -0.0, 1e-42], np.float32), 32)
    found = compute("ex2.approx.f32 {out}, {a};", [ends], np.uint32).view(np.float32)
    assert np.array_equal(
        found, np.resize(np.array([np.inf, 0, np.nan, np.inf, np.inf, 0, 0, 1, 1, 1], np.float32), 32), equal_nan=True
    )
    ends[:] = np.resize(np.array([0.0, -0.0, np.inf, -1.0, np.nan, 1.0, 1e-40, -np.inf], np.float32), 32)
    logs = compute("lg2.approx.ftz.f32 {out}, {a};", [ends], np.uint32).view(np.float32)
    assert np.array_equal(
        logs[:8], np.array([-np.inf, -np.inf, np.inf, np.nan, np.nan, 0, -np.inf, np.nan], np.float32), equal_nan=True
    )


@pytest.mark.parametrize(("kind", "error"), [("f16", 2.0**-9.9), ("bf16", 2.0**-7)])
@pytest.mark.parametrize(("op", "function"), [("ex2.approx", np.exp2), ("tanh.approx", np.tanh)])
def test_approximations_of_halves(
    kind: str, error: float, op: str, function: Callable[[np.ndarray], np.ndarray]
) -> None:
    fmt = FORMATS[kind]
    values = RANDOM.uniform(-8, 8, 32)
    a = np.array([fmt.code(exact.of_float(float(x))) for x in values], np.uint16)
    ftz = ".ftz" if (op, kind) == ("ex2.approx", "bf16") else ""
    found = compute(f"{op}{ftz}.{kind} {{out}}, {{a}};", [a], np.uint16)
    given = np.array([exact.as_float(fmt.value(int(x))) for x in a])
    got = np.array([exact.as_float(fmt.value(int(x))) for x in found])
    np.testing.assert_allclose(got, function(given), rtol=error, atol=2.0**-10.987 if op == "tanh.approx" else 0)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_kinds_of_numbers(kind: str) -> None:
    fmt = FORMATS[kind]
    a = codes(fmt, 32)
    top = (1 << (fmt.bits - 1)) - 1
    tests: dict[str, Callable[[int], bool]] = {
        "finite": lambda m: m <= fmt.largest, "infinite": lambda m: m == fmt.largest + 1,
        "number": lambda m: m <= fmt.largest + 1, "notanumber": lambda m: m > fmt.largest + 1,
        "normal": lambda m: 1 << fmt.mantissa <= m <= fmt.largest, "subnormal": lambda m: 0 < m < 1 << fmt.mantissa,
    }  # fmt: skip
    for name, holds in tests.items():
        found = compute(f"testp.{name}.{kind} %p1, {{a}}; selp.u32 {{out}}, 1, 0, %p1;", [a], np.uint32)
        assert found.tolist() == [int(holds(int(x) & top)) for x in a], name


def test_a_result_that_is_no_number_has_one_code() -> None:
    a = np.full(32, 0x7FC00123, np.uint32)
    for text in (
        "add.f32 {out}, {a}, {a};",
        "fma.rn.f32 {out}, {a}, {a}, {a};",
        "rcp.approx.f32 {out}, {a};",
        "mul.ftz.f32 {out}, {a}, {a};",
    ):
        assert compute(text, [a], np.uint32).tolist() == [0x7FFFFFFF] * 32
