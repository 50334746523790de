"""A small Hopper pipeline by hand: a ring of bulk copies that feeds products, and products of what was stored.

A warp copies tiles of A and B into two stages; a warpgroup sums their products, rounds the sum to bf16 and multiplies
it with V, once from registers and once from shared memory. That one of its fences, waits, commits and arrivals is gone
or weaker is noticed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from micro import kernel, launch
from mutants import changed_texts
from warpgroup import ROWS, THREADS, Layout, Product, matrix_of, values

from dsagen.emulator import Memory
from dsagen.errors import EmulatorError

TILES, STAGES, COLUMNS = 5, 2, 16
ROW = Layout(128)
# Sums of a tile's 64 dims come in four steps; P and V have 16.
SCORE = Product(columns=COLUMNS, a=ROW, b=ROW)
VALUE = Product(columns=COLUMNS, a=Layout(16), b=Layout(32, transposed=True))
BYTES_OF_A, BYTES_OF_B = ROW.size(ROWS), ROW.size(COLUMNS)
STAGE = BYTES_OF_A + BYTES_OF_B
P, V = STAGES * STAGE, STAGES * STAGE + VALUE.a.size(ROWS)  # type: ignore[union-attr]
BYTES_OF_V = VALUE.b.size(COLUMNS)
BARRIERS = V + BYTES_OF_V
FULL, EMPTY, LANDED = BARRIERS, BARRIERS + 8 * STAGES, BARRIERS + 16 * STAGES
WAIT = "{name}: mbarrier.try_wait.parity.shared.b64 %p4, [{bar}], {parity}; @!%p4 bra {name};"
BULK = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{to}], [{source}], {bytes}, [{bar}];"


def registers(first: str) -> list[str]:
    return [f"%{first}{n}" for n in range(SCORE.results)]


def producer() -> list[str]:
    """Lane 0 of warp 4: V, then tile after tile into the stage that was freed."""
    return [
        "PRODUCER: setp.ne.u32 %p1, %r0, 128; @%p1 bra DONE;",
        f"mbarrier.arrive.expect_tx.shared.b64 _, [%r1+{LANDED}], {BYTES_OF_V}; add.u32 %r2, %r1, {V};",
        BULK.format(to="%r2", source="%d1", bytes=BYTES_OF_V, bar=f"%r1+{LANDED}"),
        "mov.u32 %r10, 0;",
        "NEXT: and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; xor.b32 %r12, %r12, 1;",
        "mad.lo.u32 %r13, %r11, 8, %r1;",
        f"mad.lo.u32 %r14, %r11, {STAGE}, %r1;",
        WAIT.format(name="FREE", bar=f"%r13+{EMPTY}", parity="%r12"),
        f"mbarrier.arrive.expect_tx.shared.b64 _, [%r13+{FULL}], {STAGE};",
        BULK.format(to="%r14", source="%d0", bytes=BYTES_OF_A, bar=f"%r13+{FULL}"),
        f"add.u32 %r14, %r14, {BYTES_OF_A}; add.u64 %d0, %d0, {BYTES_OF_A};",
        BULK.format(to="%r14", source="%d0", bytes=BYTES_OF_B, bar=f"%r13+{FULL}"),
        f"add.u64 %d0, %d0, {BYTES_OF_B}; add.u32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, {TILES}; @%p2 bra NEXT;",
        "bra DONE;",
    ]


def scores() -> list[str]:
    """The sum over tiles; a stage is freed once the products after its own are under way."""
    d = ", ".join(registers("s"))
    steps = [
        f"{SCORE.instruction(d, '%d10', '%d11', '%p2')} setp.eq.u32 %p2, %r0, %r0;"
        " add.u64 %d10, %d10, 2; add.u64 %d11, %d11, 2;"
        for _ in range(4)
    ]
    return [
        "mov.u32 %r10, 0; setp.ne.u32 %p2, %r0, %r0;",
        "TILE: and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1; mad.lo.u32 %r13, %r11, 8, %r1;",
        f"mul.lo.u32 %r14, %r11, {STAGE >> 4}; cvt.u64.u32 %d12, %r14; add.u64 %d12, %d12, %d6;",
        f"add.u64 %d10, %d12, {ROW.descriptor(ROWS, 0)}; add.u64 %d11, %d12, {ROW.descriptor(COLUMNS, BYTES_OF_A)};",
        WAIT.format(name="FILLED", bar=f"%r13+{FULL}", parity="%r12"),
        "wgmma.fence.sync.aligned;",
        *steps,
        "wgmma.commit_group.sync.aligned;",
        # The products before have ended; theirs is the other stage.
        "wgmma.wait_group.sync.aligned 1;",
        "xor.b32 %r15, %r11, 1; mad.lo.u32 %r15, %r15, 8, %r1; and.b32 %r16, %r0, 31; setp.eq.u32 %p3, %r16, 0;",
        "setp.ne.and.u32 %p3, %r10, 0, %p3;",
        f"@%p3 mbarrier.arrive.shared.b64 _, [%r15+{EMPTY}];",
        f"add.u32 %r10, %r10, 1; setp.lt.u32 %p5, %r10, {TILES}; @%p5 bra TILE;",
        "wgmma.wait_group.sync.aligned 0;",
    ]


def products() -> list[str]:
    """P in registers of A and, by generic stores, in shared memory; then both products with V."""
    s = registers("s")
    # Rows g and g + 8 of the first 8 columns, then of the others, are the registers of A in their order.
    lines = [f"cvt.rn.bf16x2.f32 %a{n}, {s[2 * n + 1]}, {s[2 * n]};" for n in range(4)]
    lines += ["and.b32 %r20, %r0, 31; shr.u32 %r21, %r20, 2; shr.u32 %r22, %r0, 5; mad.lo.u32 %r21, %r22, 16, %r21;"]
    for n in range(4):
        # Blocks of 8 rows lie 128 bytes apart, halves of a row behind all of them.
        lines += [
            f"add.u32 %r23, %r21, {8 * (n % 2)}; shl.b32 %r23, %r23, 4; and.b32 %r24, %r0, 3;",
            "mad.lo.u32 %r23, %r24, 4, %r23; add.u32 %r23, %r23, %r1;",
            f"st.shared.b32 [%r23+{P + 1024 * (n // 2)}], %a{n};",
        ]
    a = VALUE.a
    assert a is not None
    lines += [
        f"add.u64 %d10, %d6, {a.descriptor(ROWS, P)}; add.u64 %d11, %d6, {VALUE.b.descriptor(COLUMNS, V)};",
        "fence.proxy.async.shared::cta;",
        f"bar.sync 1, {THREADS};",
        WAIT.format(name="VALUES", bar=f"%r1+{LANDED}", parity="0"),
        "setp.ne.u32 %p2, %r0, %r0;",
        "wgmma.fence.sync.aligned;",
        VALUE.instruction(", ".join(registers("t")), "%d10", "%d11", "%p2"),
        "wgmma.commit_group.sync.aligned;",
        replace(VALUE, a=None).instruction(", ".join(registers("u")), "{%a0, %a1, %a2, %a3}", "%d11", "%p2"),
        "wgmma.commit_group.sync.aligned;",
    ]
    for left, first in ((1, "t"), (0, "u")):
        lines += [f"wgmma.wait_group.sync.aligned {left};"]
        for n, name in enumerate(registers(first)):
            at = 4 * THREADS * (n + (SCORE.results if first == "u" else 0))
            lines += [f"mad.wide.u32 %d7, %r0, 4, %d2; st.global.b32 [%d7+{at}], {name};"]
    return lines


def text() -> str:
    names = [*registers("s"), *registers("t"), *registers("u"), *(f"%a{n}" for n in range(4))]
    body = [f".reg .b32 {', '.join(names)};", *(f"ld.param.u64 %d{n}, [p{n}];" for n in range(3))]
    body += ["mov.u32 %r1, tile; shr.u32 %r5, %r1, 4; and.b32 %r5, %r5, 0x3fff; cvt.u64.u32 %d6, %r5;"]
    body += ["setp.ne.u32 %p1, %r0, 0; @%p1 bra READY;"]
    for stage in range(STAGES):
        body += [f"mbarrier.init.shared.b64 [%r1+{FULL + 8 * stage}], 1;"]
        body += [f"mbarrier.init.shared.b64 [%r1+{EMPTY + 8 * stage}], 4;"]
    body += [f"mbarrier.init.shared.b64 [%r1+{LANDED}], 1;", "fence.mbarrier_init.release.cluster;"]
    body += ["READY:", f"bar.sync 0, {THREADS + 32};", f"setp.ge.u32 %p1, %r0, {THREADS}; @%p1 bra PRODUCER;"]
    body += [*scores(), *products(), "bra DONE;", *producer(), "DONE:"]
    return kernel("\n".join(body), 3, f".shared .align 1024 .b8 tile[{LANDED + 8}];\n")


def bits(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return (random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def run(ptx: str, seed: int = 0, schedule: str | None = None) -> str:
    """What goes wrong, or nothing."""
    random = np.random.default_rng(5)
    tiles, sums = np.zeros((TILES, STAGE), np.uint8), np.zeros((ROWS, COLUMNS))
    for tile in tiles:
        # Four steps of 16 dims, each an operand that begins 32 bytes on.
        for step in range(4):
            a, b = bits(random, (ROWS, 16)), bits(random, (COLUMNS, 16))
            sums += values("bf16", a) @ values("bf16", b).T
            for codes, start in ((a, 0), (b, BYTES_OF_A)):
                at = start + ROW.offsets(len(codes), 2, 32 * step)
                tile[at[..., None] + np.arange(2)] = codes[..., None].view(np.uint8).reshape(*codes.shape, 2)
    v, image = bits(random, (COLUMNS, 16)), np.zeros(BYTES_OF_V, np.uint8)
    image[VALUE.b.offsets(COLUMNS, 2)[..., None] + np.arange(2)] = v[..., None].view(np.uint8).reshape(*v.shape, 2)
    memory, out = Memory(), np.zeros((2, SCORE.results, THREADS), np.uint32)
    addresses = [memory.add(name, array) for name, array in (("tiles", tiles), ("v", image), ("out", out))]
    try:
        launch(ptx, addresses, memory, threads=THREADS + 32, seed=seed, schedule=schedule, instruction_limit=200_000)
    except EmulatorError as error:
        return str(error)
    want = sums @ values("bf16", v).T
    scale = np.abs(sums) @ np.abs(values("bf16", v)).T
    wrong = [name for name, found in zip(("shared", "registers"), out, strict=True)
             if not (np.abs(matrix_of(SCORE, found) - want) <= 2.0**-7 * scale).all()]  # fmt: skip
    return f"the product of P in {wrong} is wrong" if wrong else ""


ATTEMPTS = ((0, None), (1, "random"), (2, "priorities"), (3, "random"))
# Changes that make no difference, by how the instruction begins and which of those it is, with the reason.
EQUIVALENTS = {
    ("relaxed", "mbarrier.arrive.expect_tx.shared.b64", copy): "the producer has written nothing that others read: "
    "their bytes come by copies, whose completion orders them"
    for copy in range(2)
}


@pytest.mark.parametrize("seed", range(8))
def test_it_is_right_in_any_order(seed: int) -> None:
    assert run(text(), seed, (None, "random", "priorities")[seed % 3]) == ""


def test_every_change_is_noticed() -> None:
    missed, stale, seen = [], [], dict[tuple[str, str], int]()
    for changed in changed_texts(text()):
        begin = changed.instruction.split(" ")[0].rstrip(";")
        copy = seen.get((changed.change, begin), 0)
        seen[changed.change, begin] = copy + 1
        known = (changed.change, begin, copy) in EQUIVALENTS
        found = next(filter(None, (run(changed.ptx, *attempt) for attempt in ATTEMPTS)), "")
        if found == "" and not known:
            missed.append((changed.change, changed.instruction, copy))
        if found != "" and known:
            stale.append((changed.change, changed.instruction, copy, found.splitlines()[0]))
    assert sum(seen.values()) > 30
    assert missed == []
    assert stale == []
