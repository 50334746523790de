"""Matrix products, loads and transpositions of every type and shape, and what lanes of a warp do together."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import exact
import numpy as np
import pytest
from exact import FORMATS
from micro import kernel, launch

from dsagen.emulator import Memory
from dsagen.errors import EmulatorError

RANDOM = np.random.default_rng(37)
# Elements in a register, bits of an element.
WIDTHS = {"f16": 2, "bf16": 2, "tf32": 1, "e4m3": 4, "e5m2": 4, "e2m1": 4, "e2m3": 4, "e3m2": 4, "s8": 4, "u8": 4}


def words_of(lanes: np.ndarray, body: str, inputs: int, results: int, declarations: str = "") -> np.ndarray:
    """`lanes` [32, inputs] come in %r20.., `body` leaves results in %r100..; returns [32, results]."""
    memory, out = Memory(), np.zeros((32, results), np.uint32)
    source = np.ascontiguousarray(lanes.astype(np.uint32))
    text = f"ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mad.wide.u32 %d0, %r0, {4 * inputs}, %d0;"
    text += f"mad.wide.u32 %d1, %r0, {4 * results}, %d1;"
    text += "".join(f"ld.global.b32 %r{20 + n}, [%d0+{4 * n}];" for n in range(inputs)) + body
    text += "".join(f"st.global.b32 [%d1+{4 * n}], %r{100 + n};" for n in range(results))
    addresses = [memory.add("lanes", source), memory.add("out", out)]
    launch(kernel(text, 2, declarations), addresses, memory)
    return out


def random_codes(kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Codes of moderate numbers."""
    if kind in ("s8", "u8"):
        return RANDOM.integers(0, 256, shape)
    if kind in ("e2m1", "e2m3", "e3m2"):
        return RANDOM.integers(0, 1 << FORMATS[kind].bits, shape)
    values = RANDOM.standard_normal(shape)
    return np.array([[FORMATS[kind].code(exact.of_float(float(x)), finite=True) for x in row] for row in values])


def value(kind: str, code: int) -> float:
    if kind == "s8":
        return float(np.uint8(code).astype(np.int8))
    return float(code) if kind == "u8" else exact.as_float(FORMATS[kind].value(code))


def packed(kind: str, codes: list[int]) -> int:
    """A register of elements, the first at the bottom; tf32 without its low bits, e2m1 in the middle of its byte."""
    width = 32 // WIDTHS[kind]
    shift = {"tf32": 13, "e2m1": 2}.get(kind, 0)
    return sum(code << shift + width * n for n, code in enumerate(codes))


def fragments(kind: str, rows: np.ndarray) -> list[list[int]]:
    """Registers of lanes for A (16 rows) or the columns of B (8): rows g and g + 8, dims of each quarter of the row."""
    w = WIDTHS[kind]
    lanes = []
    for lane in range(32):
        g, c = lane // 4, lane % 4
        registers = []
        for first in range(0, rows.shape[1], 4 * w):
            for row in range(g, len(rows), 8):
                at = first + w * c
                registers.append(packed(kind, [int(x) for x in rows[row, at : at + w]]))
        lanes.append(registers)
    return lanes


PLAIN = [
    *(("f32", kind, kind, k) for kind in ("f16", "bf16") for k in (8, 16)),
    ("f16", "f16", "f16", 8), ("f16", "f16", "f16", 16),
    ("f32", "tf32", "tf32", 4), ("f32", "tf32", "tf32", 8),
    *((to, a, b, k) for to in ("f32", "f16") for a, b in product(("e4m3", "e5m2"), repeat=2) for k in (16, 32)),
    *(("s32", a, b, k) for a, b in product(("s8", "u8"), repeat=2) for k in (16, 32)),
]  # fmt: skip
SMALL = [
    (to, a, b, 32)
    for to, a, b in (("f32", "e2m1", "e3m2"), ("f32", "e2m3", "e4m3"), ("f16", "e5m2", "e2m1"), ("f32", "e4m3", "e4m3"))
]


@pytest.mark.parametrize(
    ("to", "a_kind", "b_kind", "k", "qualifier"),
    [*((*row, "") for row in PLAIN), *((*row, ".kind::f8f6f4") for row in SMALL)],
)
def test_products(to: str, a_kind: str, b_kind: str, k: int, qualifier: str) -> None:
    a, b = random_codes(a_kind, (16, k)), random_codes(b_kind, (8, k))
    c = (
        RANDOM.integers(-1000, 1000, (16, 8))
        if to == "s32"
        else RANDOM.standard_normal((16, 8)).astype(np.float16 if to == "f16" else np.float32)
    )
    sources = [x + y for x, y in zip(fragments(a_kind, a), fragments(b_kind, b), strict=True)]
    places = [[(lane // 4 + 8 * (z >> 1), 2 * (lane % 4) + z % 2) for z in range(4)] for lane in range(32)]
    for lane, registers in enumerate(sources):
        values = [c[place] for place in places[lane]]
        if to == "f16":
            registers += [int(np.array(values[n : n + 2], np.float16).view(np.uint32)[0]) for n in (0, 2)]
        else:
            registers += [int(np.array(x, np.int32 if to == "s32" else np.float32).view(np.uint32)) for x in values]
    results = 2 if to == "f16" else 4
    na, nb = len(fragments(a_kind, a)[0]), len(fragments(b_kind, b)[0])
    names = [
        [f"%r{20 + n}" for n in range(first, first + many)] for first, many in ((0, na), (na, nb), (na + nb, results))
    ]
    d = [f"%r{100 + n}" for n in range(results)]
    groups = ", ".join("{" + ", ".join(group) + "}" for group in (d, *names))
    body = f"mma.sync.aligned.m16n8k{k}.row.col{qualifier}.{to}.{a_kind}.{b_kind}.{to} {groups};"
    out = words_of(np.array(sources), body, len(sources[0]), results)
    x, y = (
        np.array([[value(kind, int(code)) for code in row] for row in codes])
        for kind, codes in ((a_kind, a), (b_kind, b))
    )
    want = x @ y.T + c.astype(np.float64)
    found = np.zeros((16, 8))
    for lane in range(32):
        typed = out[lane].view({"f16": np.float16, "s32": np.int32, "f32": np.float32}[to])
        for place, got in zip(places[lane], typed, strict=True):
            found[place] = got
    scale = np.abs(x) @ np.abs(y.T) + np.abs(c)
    if to == "s32":
        assert np.array_equal(found, want)
    else:
        assert (np.abs(found - want) <= scale * (2.0**-10 if to == "f16" else 2.0**-20)).all()


def test_sums_of_bytes_saturate_where_that_is_asked_for() -> None:
    lanes = np.full((32, 10), 0x7F7F7F7F)
    lanes[:, 6:] = 0x7FFFFFF0
    operands = "{%r100, %r101, %r102, %r103}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r26, %r27, %r28, %r29};"
    for satfinite, want in ((".satfinite", 0x7FFFFFFF), ("", (0x7FFFFFF0 + 32 * 127 * 127) & 0xFFFFFFFF)):
        out = words_of(lanes, f"mma.sync.aligned.m16n8k32.row.col{satfinite}.s32.s8.s8.s32 {operands}", 10, 4)
        assert set(out.ravel().tolist()) == {want}


@pytest.mark.parametrize("text", [
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32", "mma.sync.aligned.m16n8k32.row.col.f32.e2m1.e2m1.f32",
    "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16", "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
])  # fmt: skip
def test_products_that_are_not_there(text: str) -> None:
    operands = "{%r100, %r101, %r102, %r103}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r26, %r27, %r28, %r29};"
    with pytest.raises(EmulatorError, match="does not have this instruction"):
        words_of(np.zeros((32, 10)), f"{text} {operands}", 10, 4)


# ---- matrices in shared memory --------------------------------------------------------------------------------------

FILL = """mov.u64 %d5, tile; cvt.u32.u64 %r1, %d5; mad.lo.u32 %r2, %r0, 16, %r1;
st.shared.v4.b32 [%r2], {%r20, %r21, %r22, %r23}; bar.warp.sync 0xffffffff;
"""
TILE = ".shared .align 16 .b8 tile[2048];\n"


def registers(count: int) -> str:
    return "{" + ", ".join(f"%r{100 + n}" for n in range(count)) + "}"


@pytest.mark.parametrize("space", [".shared", ".shared::cta", ""])
@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_loads_of_8_by_8(count: int, trans: str, space: str) -> None:
    rows = RANDOM.integers(0, 2**32, (32, 4), dtype=np.uint32)
    address = "%r2" if space else "%d7"
    body = FILL + "mul.wide.u32 %d6, %r0, 16; cvta.shared.u64 %d7, %d5; add.u64 %d7, %d7, %d6;"
    body += f"ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16 {registers(count)}, [{address}];"
    out = words_of(rows, body, 4, count, TILE)
    halves = rows.view(np.uint16).reshape(32, 8)
    for z in range(count):
        matrix = halves[8 * z : 8 * z + 8]
        matrix = matrix.T if trans else matrix
        assert np.array_equal(np.ascontiguousarray(out[:, z]).view(np.uint16).reshape(8, 8), matrix)


@pytest.mark.parametrize(("form", "count", "kind"), [
    ("m16n16", 1, "b8"), ("m16n16", 2, "b8"), ("m16n16", 1, "b8x16.b4x16_p64"), ("m16n16", 2, "b8x16.b6x16_p32"),
    ("m8n16", 1, "b8x16.b4x16_p64"), ("m8n16", 4, "b8x16.b6x16_p32"),
])  # fmt: skip
def test_loads_of_bytes(form: str, count: int, kind: str) -> None:
    rows = RANDOM.integers(0, 2**32, (32, 4), dtype=np.uint32)
    many = 2 * count if form == "m16n16" else count
    trans = ".trans" if form == "m16n16" else ""
    out = words_of(
        rows,
        FILL + f"ldmatrix.sync.aligned.{form}.x{count}{trans}.shared.{kind} {registers(many)}, [%r2];",
        4,
        many,
        TILE,
    )
    data = [int.from_bytes(row.tobytes(), "little") for row in rows]
    bits = {"b8": 8, "b8x16.b4x16_p64": 4, "b8x16.b6x16_p32": 6}[kind]
    shift = 2 if bits == 4 else 0
    spread = np.array([[(row >> bits * n & (1 << bits) - 1) << shift for n in range(16)] for row in data], np.uint8)
    for z in range(many):
        if form == "m16n16":
            want = spread[16 * (z // 2) : 16 * (z // 2) + 16].T[8 * (z % 2) : 8 * (z % 2) + 8]
        else:
            want = spread[8 * z : 8 * z + 8]
        assert np.array_equal(np.ascontiguousarray(out[:, z]).view(np.uint8).reshape(8, 16), want)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stored_matrix_comes_back(count: int, trans: str) -> None:
    lanes = RANDOM.integers(0, 2**32, (32, 4), dtype=np.uint32)
    sources = "{" + ", ".join(f"%r{20 + n}" for n in range(count)) + "}"
    body = FILL + f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2], {sources}; bar.warp.sync 0xffffffff;"
    body += f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers(count)}, [%r2];"
    assert np.array_equal(words_of(lanes, body, 4, count, TILE), lanes[:, :count])


def test_a_matrix_in_registers_is_transposed() -> None:
    lanes = RANDOM.integers(0, 2**32, (32, 1), dtype=np.uint32)
    out = words_of(lanes, "movmatrix.sync.aligned.m8n8.trans.b16 %r100, %r20;", 1, 1)
    matrix = np.ascontiguousarray(lanes).view(np.uint16).reshape(8, 8)
    assert np.array_equal(np.ascontiguousarray(out).view(np.uint16).reshape(8, 8), matrix.T)


# ---- lanes of a warp ------------------------------------------------------------------------------------------------


def tiles(text: str) -> str:
    """The member mask of each lane's tile of 8, all lanes at one instruction."""
    return "and.b32 %r3, %r0, 24; mov.u32 %r4, 255; shl.b32 %r4, %r4, %r3;" + text


LANES: list[tuple[str, Callable[[np.ndarray, int], int]]] = [
    (tiles("redux.sync.add.u32 %r100, %r20, %r4;"), lambda a, n: int(a[n & 24 : (n & 24) + 8].sum()) & 0xFFFFFFFF),
    (tiles("shfl.sync.bfly.b32 %r100, %r20, 3, 31, %r4;"), lambda a, n: int(a[n ^ 3])),
    (tiles("bar.warp.sync %r4; mov.u32 %r100, %r20;"), lambda a, n: int(a[n])),
    (tiles("and.b32 %r5, %r20, 1; match.any.sync.b32 %r100, %r5, %r4;"),
     lambda a, n: sum(1 << m for m in range(n // 8 * 8, n // 8 * 8 + 8) if (a[m] ^ a[n]) & 1 == 0)),
    (tiles("elect.sync %r100|%p1, %r4;"), lambda a, n: n // 8 * 8),
    ("match.all.sync.b32 %r100|%p1, 7, 0xffffffff; @!%p1 mov.u32 %r100, 5;", lambda a, n: 0xFFFFFFFF),
    ("match.all.sync.b32 %r100|%p1, %r20, 0xffffffff; @%p1 mov.u32 %r100, 5;", lambda a, n: 0),
    ("cvt.u64.u32 %d5, %r20; and.b64 %d5, %d5, 3; match.any.sync.b64 %r100, %d5, 0xffffffff;",
     lambda a, n: sum(1 << m for m in range(32) if (a[m] ^ a[n]) & 3 == 0)),
    ("redux.sync.min.s32 %r100, %r20, 0xffffffff;", lambda a, n: int(a.view(np.int32).min()) & 0xFFFFFFFF),
    ("redux.sync.max.s32 %r100, %r20, 0xffffffff;", lambda a, n: int(a.view(np.int32).max()) & 0xFFFFFFFF),
    ("redux.sync.min.u32 %r100, %r20, 0xffffffff;", lambda a, n: int(a.min())),
    ("redux.sync.max.u32 %r100, %r20, 0xffffffff;", lambda a, n: int(a.max())),
    ("redux.sync.and.b32 %r100, %r20, 0xffffffff;", lambda a, n: int(np.bitwise_and.reduce(a))),
    ("redux.sync.or.b32 %r100, %r20, 0xffffffff;", lambda a, n: int(np.bitwise_or.reduce(a))),
    ("redux.sync.xor.b32 %r100, %r20, 0xffffffff;", lambda a, n: int(np.bitwise_xor.reduce(a))),
    ("setp.eq.u32 %p1, %r0, 9; vote.sync.any.pred %p2, %p1, 0xffffffff; selp.u32 %r100, 1, 0, %p2;", lambda a, n: 1),
    ("setp.lt.u32 %p1, %r0, 31; vote.sync.all.pred %p2, %p1, 0xffffffff; selp.u32 %r100, 1, 0, %p2;", lambda a, n: 0),
    ("setp.lt.u32 %p1, %r0, 40; vote.sync.uni.pred %p2, !%p1, 0xffffffff; selp.u32 %r100, 1, 0, %p2;", lambda a, n: 1),
    ("setp.lt.u32 %p1, %r0, 5; @%p1 bra SKIP; activemask.b32 %r100; bra END; SKIP: mov.u32 %r100, 1; END:",
     lambda a, n: 1 if n < 5 else 0xFFFFFFE0),
    ("mov.u32 %r100, %nwarpid; mov.u32 %r5, WARP_SZ; mad.lo.u32 %r100, %r100, 100, %r5;", lambda a, n: 132),
    ("mov.u32 %r100, %lanemask_ge;", lambda a, n: -(1 << n) & 0xFFFFFFFF),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "want"), LANES, ids=[text.split(";")[-2].split()[0] + str(n) for n, (text, _) in enumerate(LANES)]
)
def test_lanes_together(text: str, want: Callable[[np.ndarray, int], int]) -> None:
    a = RANDOM.integers(0, 2**32, 32, dtype=np.uint32)
    assert words_of(a.reshape(32, 1), text, 1, 1).ravel().tolist() == [want(a, n) for n in range(32)]


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("qualifier", ["", ".abs", ".NaN", ".abs.NaN"])
def test_reductions_of_floats(op: str, qualifier: str) -> None:
    for special in ([], [np.nan], [-0.0, 0.0] * 16, [np.nan] * 32):
        a = RANDOM.standard_normal(32).astype(np.float32)
        a[: len(special)] = special
        out = words_of(
            a.view(np.uint32).reshape(32, 1), f"redux.sync.{op}{qualifier}.f32 %r100, %r20, 0xffffffff;", 1, 1
        )
        values = [abs(float(x)) if "abs" in qualifier else float(x) for x in a]
        kept = [x for x in values if not math.isnan(x)]
        if not kept or ("NaN" in qualifier and len(kept) < 32):
            want = 0x7FFFFFFF
        else:
            pick = (min if op == "min" else max)(kept, key=lambda x: (x, math.copysign(1, x)))
            want = int(np.float32(pick).view(np.uint32))
        assert set(out.ravel().tolist()) == {want}


def test_lanes_of_one_set_must_name_the_same() -> None:
    text = "mov.u32 %r4, 0xffffffff; setp.eq.u32 %p1, %r0, 3; @%p1 mov.u32 %r4, 0x0000000f;"
    text += "shfl.sync.idx.b32 %r100, %r0, 0, 31, %r4;"
    with pytest.raises(EmulatorError, match=r"lane \d names the lanes 0x\w+, others of its set 0x\w+"):
        words_of(np.zeros((32, 1)), text, 1, 1)


@pytest.mark.parametrize("text", [
    "barrier.cta.red.popc.aligned.u32 %r100, 1, 32, %p1;", "barrier.red.popc.u32 %r100, 1, %p1;",
    "bar.red.popc.u32 %r100, 1, 32, %p1;",
    "bar.cta.red.popc.u32 %r100, 1, %p1;",
])  # fmt: skip
def test_spellings_of_barriers_that_count(text: str) -> None:
    assert set(words_of(np.zeros((32, 1)), "setp.lt.u32 %p1, %r0, 9;" + text, 1, 1).ravel().tolist()) == {9}
