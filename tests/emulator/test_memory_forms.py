"""Loads, stores and atomics in every space, width and spelling; addresses of all spaces."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import exact
import numpy as np
import pytest
from exact import FORMATS
from micro import kernel, launch

from dsagen.emulator import Memory
from dsagen.errors import EmulatorError

RANDOM = np.random.default_rng(31)
POINTERS = "ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2];\n"
TILE = ".shared .align 16 .b8 tile[4096];\n"


def run(body: str, *arrays: np.ndarray, threads: int = 32, declarations: str = "", **options: int) -> None:
    """Arrays lie at p0, p1, .. in %d0, %d1, .."""
    memory = Memory()
    addresses = [memory.add(f"array{n}", array) for n, array in enumerate(arrays)]
    loads = "".join(f"ld.param.u64 %d{n}, [p{n}];\n" for n in range(len(arrays)))
    launch(kernel(loads + body, len(arrays), declarations), addresses, memory, threads=threads, **options)


ORDERS = (
    "", ".volatile", ".relaxed.gpu", ".acquire.sys", ".weak", ".ca", ".cg", ".cs", ".cv", ".nc", ".L1::no_allocate",
    ".L1::evict_first.L2::128B", ".relaxed.cluster.L1::evict_last", ".nc.L2::256B",
)  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_spellings_of_loads(order: str) -> None:
    source, out = RANDOM.integers(0, 2**32, 32, dtype=np.uint32), np.zeros(32, np.uint32)
    before, after = ("", order) if not order.startswith((".volatile", ".relaxed", ".acquire", ".weak")) else (order, "")
    head, _, tail = before.partition(".L1")
    text = f"ld{head}.global{('.L1' + tail) if tail else after}.u32"
    places = "mul.wide.u32 %d5, %r0, 4; add.u64 %d6, %d0, %d5; add.u64 %d7, %d1, %d5;"
    run(f"{places} {text} %r5, [%d6]; st.global.u32 [%d7], %r5;", source, out)
    assert np.array_equal(source, out)


@pytest.mark.parametrize(
    "order", ["", ".volatile", ".relaxed.gpu", ".release.sys", ".wb", ".cg", ".wt", ".L1::no_allocate"]
)
def test_spellings_of_stores(order: str) -> None:
    out = np.zeros(32, np.uint32)
    text = (
        f"st{order}.global.u32" if order.startswith((".volatile", ".relaxed", ".release")) else f"st.global{order}.u32"
    )
    run(f"mad.wide.u32 %d5, %r0, 4, %d0; {text} [%d5], %r0;", out)
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize("space", ["global", "shared", "local", ""])
@pytest.mark.parametrize(("bits", "count"), [*product((8, 16, 32, 64), (1, 2, 4)), (32, 8), (128, 1)])
def test_widths_and_vectors(space: str, bits: int, count: int) -> None:
    size = bits * count // 8
    if size > 32:
        return
    source, out = RANDOM.integers(0, 256, 32 * size, dtype=np.uint8), np.zeros(32 * size, np.uint8)
    scratch = np.zeros(32 * size, np.uint8)
    r = {8: "%h", 16: "%h", 32: "%r", 64: "%d", 128: "q"}[bits]
    registers = [f"{r}{20 + n}" if bits < 128 else "q0" for n in range(count)]
    vector = "{" + ", ".join(registers) + "}" if count > 1 else registers[0]
    kind = f".v{count}.b{bits}" if count > 1 else f".b{bits}"
    where = {
        "global": f"mad.wide.u32 %d9, %r0, {size}, %d2;", "": f"mad.wide.u32 %d9, %r0, {size}, %d2;",
        "shared": f"mov.u64 %d8, tile; mad.wide.u32 %d9, %r0, {size}, %d8;", "local": "mov.u64 %d9, own;",
    }[space]  # fmt: skip
    dot = f".{space}" if space else ""
    body = f""".reg .b128 q0; .local .align 32 .b8 own[32];
    mul.wide.u32 %d5, %r0, {size}; add.u64 %d6, %d0, %d5; add.u64 %d7, %d1, %d5; {where}
    ld.global{kind} {vector}, [%d6]; st{dot}{kind} [%d9], {vector};
    {" ".join(f"mov.b{max(bits, 16)} {x}, 0;" for x in registers) if bits < 128 else ""}
    ld{dot}{kind} {vector}, [%d9]; st.global{kind} [%d7], {vector};"""
    run(body, source, out, scratch, declarations=TILE.replace("align 16", "align 32"))
    assert np.array_equal(source, out)


def test_narrow_loads_extend_by_their_sign() -> None:
    source, out = np.array([0x80, 0x7F, 0xFF, 0x01] * 8, np.uint8), np.zeros(64, np.int64)
    body = """cvt.u64.u32 %d5, %r0; add.u64 %d5, %d0, %d5; ld.global.s8 %d6, [%d5]; ld.global.u8 %d7, [%d5];
    mad.wide.u32 %d8, %r0, 16, %d1; st.global.v2.b64 [%d8], {%d6, %d7};"""
    run(body, source, out)
    assert out.reshape(32, 2).tolist() == [[int(x) - 256 if x > 127 else int(x), int(x)] for x in source]


def test_addresses_of_all_spaces() -> None:
    out = np.zeros(32, np.uint32)
    tests = {"shared": "%d10", "local": "%d11", "global": "%d0", "const": "%d12"}
    body = """.local .align 8 .b8 own[8]; .reg .pred q<9>;
    mov.u64 %d5, tile; cvta.shared.u64 %d10, %d5; mov.u64 %d6, own; cvta.local.u64 %d11, %d6; mov.u64 %d7, table;
    cvta.const.u64 %d12, %d7; cvta.to.shared.u64 %d13, %d10; setp.eq.u64 q0, %d13, %d5; selp.u32 %r9, 1, 0, q0;
    mul.lo.u32 %r3, %r0, 4; cvt.u64.u32 %d14, %r3; add.u64 %d15, %d10, %d14; st.u32 [%d15], %r0; bar.warp.sync -1;
    ld.shared.u32 %r4, [tile];
    """
    for n, (space, register) in enumerate(tests.items()):
        body += f"isspacep.{space} q1, {register}; @q1 or.b32 %r9, %r9, {2 << n};\n"
        for other in tests.values():
            if other != register and not (space == "global" and other == "%d12"):
                body += f"isspacep.{space} q1, {other}; @q1 or.b32 %r9, %r9, 1024;\n" if space != "const" else ""
    body += "ld.u8 %h5, [%d12+1]; cvt.u32.u16 %r5, %h5; mad.lo.u32 %r9, %r5, 65536, %r9;"
    body += "mad.wide.u32 %d5, %r0, 4, %d0; st.global.u32 [%d5], %r9;"
    run(body, out, declarations=TILE + ".const .align 4 .b8 table[4] = {1, 7, 3};")
    # Constant memory is global memory that nobody writes, so isspacep.const says no.
    assert {hex(x) for x in out.tolist()} == {hex(7 << 16 | 1 | 2 | 4 | 8)}


ATOMS: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda old, b, c: old + b, "min": lambda old, b, c: min(old, b), "max": lambda old, b, c: max(old, b),
    "and": lambda old, b, c: old & b, "or": lambda old, b, c: old | b, "xor": lambda old, b, c: old ^ b,
    "exch": lambda old, b, c: b, "cas": lambda old, b, c: c if old == b else old,
    "inc": lambda old, b, c: 0 if old >= b else old + 1, "dec": lambda old, b, c: b if old == 0 or old > b else old - 1,
}  # fmt: skip
ATOM_TYPES = [
    *product(("add", "min", "max"), ("u32", "s32", "u64", "s64")),
    *product(("and", "or", "xor", "exch", "cas"), ("b32", "b64")),
    ("inc", "u32"), ("dec", "u32"), ("cas", "b16"), ("exch", "b128"), ("cas", "b128"),
]  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared", ""])
@pytest.mark.parametrize(("op", "kind"), ATOM_TYPES)
def test_atomics_one_after_the_other(op: str, kind: str, space: str) -> None:
    bits = int(kind[1:])
    size, low, high = bits // 8, 0, (1 << bits) - 1
    if kind[0] == "s":
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    # Every lane has a word of its own, so that the result does not depend on an order.
    olds, bs, cs = ([int.from_bytes(RANDOM.bytes(size), "little") for _ in range(32)] for _ in range(3))
    bs[::3] = olds[::3]
    if op in ("inc", "dec"):
        olds[1::3] = [0] * len(olds[1::3])
    pack = lambda values: np.frombuffer(b"".join(v.to_bytes(size, "little") for v in values), np.uint8).copy()  # noqa: E731
    data, operands, results = pack(olds), pack([v for pair in zip(bs, cs, strict=True) for v in pair]), pack(olds)
    r = {16: "%h", 32: "%r", 64: "%d", 128: "q"}[bits]
    b, c, d = (f"{r}{n}" for n in (23, 24, 25))
    dot, at = (f".{space}", {"shared": "%d8", "global": "%d5"}[space]) if space else ("", "%d5")
    third = f", {c}" if op == "cas" else ""
    body = f""".reg .b128 q<26>;
    mul.wide.u32 %d6, %r0, {size}; add.u64 %d5, %d0, %d6; mad.wide.u32 %d7, %r0, {2 * size}, %d1; add.u64 %d9, %d2, %d6;
    ld.global.b{bits} {b}, [%d7]; ld.global.b{bits} {c}, [%d7+{size}]; ld.global.b{bits} {d}, [%d5];
    mov.u64 %d8, tile; add.u64 %d8, %d8, %d6; st.shared.b{bits} [%d8], {d};
    atom{dot}.{op}.{kind} {d}, [{at}], {b}{third}; st.global.b{bits} [%d9], {d};
    {f"ld.shared.b{bits} {d}, [%d8]; st.global.b{bits} [%d5], {d};" if space == "shared" else ""}"""
    run(body, data, operands, results, declarations=TILE)
    assert np.array_equal(results, pack(olds))

    def value(x: int) -> int:
        return x - (1 << bits) if low and x > high else x

    wanted = [ATOMS[op](value(o), value(x), value(y)) & ((1 << bits) - 1) for o, x, y in zip(olds, bs, cs, strict=True)]
    assert np.array_equal(data, pack(wanted))


FLOATS = [
    ("add", "f32", 1), ("add", "f64", 1), ("add.noftz", "f16", 1), ("add.noftz", "bf16", 1), ("add.noftz", "f16x2", 1),
    ("add.noftz", "bf16x2", 1), ("add.v2", "f32", 2), ("add.v4", "f32", 4), ("add.noftz.v4", "f16x2", 4),
    ("min.noftz.v2", "bf16x2", 2), ("max.noftz.v8", "f16", 8),
]  # fmt: skip


@pytest.mark.parametrize("how", ["atom", "red"])
@pytest.mark.parametrize(("op", "kind", "count"), FLOATS)
def test_atomics_of_floats(op: str, kind: str, count: int, how: str) -> None:
    name, pairs = kind.removesuffix("x2"), 2 if kind.endswith("x2") else 1
    fmt = FORMATS[name]
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[fmt.bits]
    elements, bits = count * pairs, fmt.bits * pairs
    values = RANDOM.standard_normal((2, 32, elements)) * 4.0 ** RANDOM.integers(-3, 4, (2, 32, elements))
    old, b = (np.array([[fmt.code(exact.of_float(float(x))) for x in row] for row in block], dtype) for block in values)
    data, operands, results = old.copy(), b, np.zeros_like(old)
    r = {16: "%h", 32: "%r", 64: "%d"}[bits]
    left, right = (
        "{" + ", ".join(f"{r}{base + n}" for n in range(count)) + "}" if count > 1 else f"{r}{base}"
        for base in (20, 30)
    )
    vector = f".v{count}" if count > 1 and count * bits <= 256 else ""
    size = elements * fmt.bits // 8
    body = f"""mul.wide.u32 %d5, %r0, {size}; add.u64 %d6, %d0, %d5; add.u64 %d7, %d1, %d5; add.u64 %d8, %d2, %d5;
    ld.global{vector}.b{bits} {right}, [%d7];"""
    if how == "atom":
        body += f"atom.global.{op}.{kind} {left}, [%d6], {right}; st.global{vector}.b{bits} [%d8], {left};"
    else:
        body += f"red.global.{op}.{kind} [%d6], {right};"
    run(body, data, operands, results)
    if how == "atom":
        assert np.array_equal(results, old)
    for got, x, y in zip(data.ravel(), old.ravel(), b.ravel(), strict=True):
        a, c = fmt.value(int(x)), fmt.value(int(y))
        if op.startswith("add"):
            want = fmt.code(exact.add(a, c))
        else:
            want = int(x) if (exact.as_float(a) < exact.as_float(c)) == op.startswith("min") else int(y)
        assert int(got) == want


def test_fp32_sums_in_global_memory_lose_subnormals_and_shared_ones_do_not() -> None:
    data = np.array([1e-40], np.float32)
    body = """mov.u32 %r5, 0; setp.eq.u32 %p1, %r0, 0; ld.global.u32 %r6, [%d0]; mov.f32 %r7, 0f000116C2;
    @%p1 st.shared.u32 [tile], %r6; @%p1 red.shared.add.f32 [tile], %r7; @%p1 red.global.add.f32 [%d0], %r7;
    @%p1 ld.shared.u32 %r5, [tile]; @%p1 st.global.u32 [%d1], %r5;"""
    kept = np.zeros(1, np.float32)
    run(body, data, kept, declarations=TILE, races=False)
    assert data[0] == 0
    assert kept[0] == np.float32(1e-40) + np.float32(1e-40)


def test_orders_and_cache_policies_change_nothing_of_an_atomic() -> None:
    total = np.zeros(2, np.uint32)
    run(
        """createpolicy.fractional.L2::evict_last.b64 %d9, 0f3F800000;
    atom.relaxed.gpu.global.add.u32 %r5, [%d0], 1; red.release.sys.global.add.u32 [%d0], 1;
    atom.acq_rel.cta.global.add.L2::cache_hint.u32 %r5, [%d0], 1, %d9; atom.global.sys.add.u32 %r5, [%d0+4], 2;
    ld.global.L2::cache_hint.u32 %r6, [%d0], %d9;""",
        total,
        races=False,
    )
    assert total.tolist() == [96, 64]


@pytest.mark.parametrize(
    "text",
    ["ld.global.v3.u32 {%r1, %r2, %r3}, [%d0];", "ld.global.v4.u32 {%r1, %r2}, [%d0];",
     "atom.global.mul.u32 %r1, [%d0], 1;", "atom.global.cas.b32 %r1, [%d0], 1;", "atom.global.add.u16 %h1, [%d0], 1;",
     "ld.global.b128 %d1, [%d0];", "atom.global.exch.f32 %r1, [%d0], %r2;"],
)  # fmt: skip
def test_what_ptx_does_not_have_fails_by_name(text: str) -> None:
    with pytest.raises(EmulatorError, match="the emulator does not have this instruction"):
        run(text, np.zeros(4, np.uint32))


@pytest.mark.parametrize("form", ["16", "16, %r5", "16, %p1", "16, !%p2"])
@pytest.mark.parametrize("opcode", ["cp.async.cg.shared.global", "cp.async.ca.shared::cta.global.L2::128B"])
def test_asynchronous_copies(opcode: str, form: str) -> None:
    source, out = RANDOM.integers(0, 2**32, 128, dtype=np.uint32), np.zeros(128, np.uint32)
    body = f"""setp.ge.u32 %p1, %r0, 20; not.pred %p2, %p1; selp.u32 %r5, 0, 16, %p1;
    mov.u64 %d5, tile; cvt.u32.u64 %r6, %d5;
    mad.lo.u32 %r6, %r0, 16, %r6; mul.wide.u32 %d7, %r0, 16; add.u64 %d8, %d0, %d7; add.u64 %d9, %d1, %d7;
    {opcode} [%r6], [%d8], {form}; cp.async.commit_group; cp.async.wait_group 0; bar.warp.sync 0xffffffff;
    ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r6]; st.global.v4.u32 [%d9], {{%r10, %r11, %r12, %r13}};"""
    run(body, source, out, declarations=TILE)
    want = source.copy()
    if form != "16":
        want[80:] = 0
    assert np.array_equal(out, want)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_sizes_of_asynchronous_copies(size: int) -> None:
    source, out = RANDOM.integers(0, 256, 32 * size, dtype=np.uint8), np.zeros(32 * size, np.uint8)
    body = f"""mov.u64 %d5, tile; cvt.u32.u64 %r6, %d5; mad.lo.u32 %r6, %r0, {size}, %r6; mul.wide.u32 %d7, %r0, {size};
    add.u64 %d8, %d0, %d7; add.u64 %d9, %d1, %d7; mov.u32 %r7, {size - 1};
    cp.async.ca.shared.global [%r6], [%d8], {size}, %r7; cp.async.wait_all; bar.warp.sync 0xffffffff;
    """
    body += "".join(f"ld.shared.u8 %h1, [%r6+{n}]; st.global.u8 [%d9+{n}], %h1;" for n in range(size))
    run(body, source, out, declarations=TILE)
    want = source.reshape(32, size).copy()
    want[:, -1] = 0
    assert np.array_equal(out.reshape(32, size), want)
