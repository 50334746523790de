"""Bulk copies, and what CTAs of a cluster do in each other's shared memory."""

from __future__ import annotations

import numpy as np
from micro import kernel

from calibration.boxes import UNTOUCHED, bounded_wait, moderate
from calibration.case import Case

_SHARED = ".shared .align 128 .b8 tile[1024];\n.shared .align 128 .b8 mail[1024];\n.shared .align 8 .b8 bar[16];\n"
# %r1 the tile, %r2 the lane's word of it, %r8 and %r9 the same of the mail, %r10 the mbarrier; %r11 the rank, %r12 the
# next one's, %r13 its mail and %r14 its mbarrier; %d0 the input, %d1 the lane's word of the CTA's rows of the output;
# %p1 is thread 0.
_SETUP = """
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r1, tile; mov.u32 %r8, mail; mov.u32 %r10, bar;
mad.lo.u32 %r2, %r0, 4, %r1; mad.lo.u32 %r9, %r0, 4, %r8; setp.eq.u32 %p1, %r0, 0;
mov.u32 %r11, %cluster_ctarank; mov.u32 %r15, %cluster_nctarank; add.u32 %r12, %r11, 1; rem.u32 %r12, %r12, %r15;
mapa.shared::cluster.u32 %r13, %r8, %r12; mapa.shared::cluster.u32 %r14, %r10, %r12;
mov.u32 %r16, %ctaid.x; mad.lo.u32 %r17, %r16, ROWS, %r0; mad.wide.u32 %d1, %r17, 4, %d1;
@%p1 mbarrier.init.shared.b64 [%r10], COUNT; @%p1 fence.mbarrier_init.release.cluster;
"""
_MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
_READY = "fence.proxy.async; bar.sync 0;\n"
_WORDS = 64  # of the mail that is written out


def _fill(value: str = "") -> str:
    """The tile gets words of the input, another row in each CTA; the mail a word that no copy brings, or zeros."""
    body = (
        "mad.lo.u32 %r3, %r16, 1024, 0; mad.wide.u32 %d2, %r0, 4, %d0; cvt.u64.u32 %d3, %r3; add.u64 %d2, %d2, %d3;\n"
    )
    for n in range(0, 1024, 128):
        body += f"ld.global.u32 %r4, [%d2+{n}]; st.shared.u32 [%r2+{n}], %r4;"
        body += f"st.shared.u32 [%r9+{n}], {value or UNTOUCHED};\n"
    return body + "fence.proxy.async; " + _MEET


def _of_ctas(
    name: str, body: str, ctas: int, rows: int = 1, inputs: np.ndarray | None = None, count: int = 1, kind: str = "u4"
) -> Case:
    """Each CTA writes so many rows of 32 words, which begin at %d1."""
    if inputs is None:
        inputs = np.random.default_rng(51).integers(0, 1 << 31, 256 * ctas, np.uint32)
    setup = _SETUP.replace("ROWS", str(32 * rows)).replace("COUNT", str(count))
    text = kernel(setup + body + _MEET, 2, _SHARED)
    shape = (ctas, rows, 128 // np.dtype(kind).itemsize)
    return Case(name, text, (inputs,), shape, kind, threads=32, grid=ctas, cluster=ctas)


def _dump(words: int = _WORDS, of: str = "%r9", row: int = 0) -> str:
    return "".join(
        f"ld.shared.u32 %r4, [{of}+{4 * n}]; st.global.u32 [%d1+{128 * row + 4 * n}], %r4;\n"
        for n in range(0, words, 32)
    )


def addresses() -> list[Case]:
    """Addresses of other CTAs: their bits, ranks and spaces; and accesses by them."""
    found = []
    bits = [
        "mov.u32 %r4, %r1;", "sub.u32 %r4, %r8, %r1;",
        "mapa.shared::cluster.u32 %r4, %r1, %r11; sub.u32 %r4, %r4, %r1;",
        *(f"mapa.shared::cluster.u32 %r4, %r1, {r}; mapa.shared::cluster.u32 %r5, %r1, 0; sub.u32 %r4, %r4, %r5;"
          for r in range(2)),
        "mapa.shared::cluster.u32 %r4, %r13, %r11; sub.u32 %r4, %r4, %r8;",
        "getctarank.shared::cluster.u32 %r4, %r13;", "getctarank.shared::cluster.u32 %r4, %r1;",
        "cvt.u64.u32 %d5, %r13; cvta.shared::cluster.u64 %d5, %d5; getctarank.u64 %r4, %d5;",
        "cvt.u64.u32 %d5, %r8; cvta.shared.u64 %d5, %d5; mapa.u64 %d6, %d5, %r12; getctarank.u64 %r4, %d6;",
        "cvta.to.shared::cluster.u64 %d7, %d6; cvt.u32.u64 %r4, %d7; sub.u32 %r4, %r4, %r13;",
        *(f"isspacep.shared{space} %p2, %d{n}; selp.u32 %r4, 1, 0, %p2;"
          for n in (5, 6) for space in ("", "::cta", "::cluster")),
    ]  # fmt: skip
    for size in (2, 4):
        body = _MEET + "".join(f"{text} st.global.u32 [%d1+{128 * n}], %r4;\n" for n, text in enumerate(bits))
        found.append(_of_ctas(f"cluster{size}.addresses", body, size, len(bits)))
        send = "add.u32 %r4, %r0, %r11; ld.shared.u32 %r5, [%r2];"
        remote = "mapa.shared::cluster.u32 %r6, %r2, %r12; mad.lo.u32 %r7, %r0, 4, %r13;\n"
        generic = "cvt.u64.u32 %d5, %r2; cvta.shared.u64 %d5, %d5; mapa.u64 %d5, %d5, %r12; ld.u32 %r4, [%d5];"
        body = _fill() + send + remote + "st.shared::cluster.u32 [%r7], %r5;" + _MEET
        body += _dump(32) + "ld.shared::cluster.u32 %r4, [%r6]; st.global.u32 [%d1+128], %r4;"
        body += generic + "st.global.u32 [%d1+256], %r4;" + _MEET
        body += "red.relaxed.cluster.shared::cluster.add.u32 [%r7], 3;" + _MEET + _dump(32, row=3)
        found.append(_of_ctas(f"cluster{size}.accesses", body, size, 4))
    return found


def arrivals() -> list[Case]:
    """Arrivals and bytes at another CTA's mbarrier."""
    found = []
    arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r14]{};"
    for name, count, text in (
        ("lanes", 32, arrive.format("")), ("counts", 64, arrive.format(", 2")),
        ("bytes", 1, "@%p1 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r14], 32;"
                     "@%p1 mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r14], 32;"),
    ):  # fmt: skip
        body = _MEET + text + bounded_wait("W", 0).replace("_wait.parity.", "_wait.parity.acquire.cluster.")
        found.append(_of_ctas(f"cluster.arrive.{name}", body + "st.global.u32 [%d1], %r6;", 2, count=count))
    return found


_SCALARS = {"add": "u32 s32 u64", "min": "u32 s32", "max": "u32 s32", "inc": "u32", "dec": "u32"}
_SCALARS |= dict.fromkeys(("and", "or", "xor"), "b32")


def stores() -> list[Case]:
    """st.async and red.async: a word, or a vector, of each lane, for the next CTA."""
    found = []
    bytes_ = "mbarrier::complete_tx::bytes"
    wait = bounded_wait("W", 0).replace("_wait.parity.", "_wait.parity.acquire.cluster.")
    for vector, kind in (("", "b32"), (".v2", "b32"), (".v4", "b32"), ("", "b64"), (".v2", "b64"), (".v4", "f32")):
        count, size = int(vector[2:] or 1), int(kind[1:]) // 8
        wide = size == 8
        names = [f"%d{20 + n}" if wide else f"%r{20 + n}" for n in range(count)]
        body = _fill() + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {32 * size * count};"
        body += "".join(f"ld.shared.b{8 * size} {name}, [%r1+{8 * n}];" for n, name in enumerate(names))
        low = "cvt.u64.u32 %d9, %r0; xor.b64 {0}, {0}, %d9;" if wide else "xor.b32 {0}, {0}, %r0;"
        body += "".join(low.format(name) for name in names)
        body += f"mad.lo.u32 %r7, %r0, {size * count}, %r13;"
        value = f"{{{', '.join(names)}}}" if vector else names[0]
        body += f"st.async.weak.shared::cluster.{bytes_}{vector}.{kind} [%r7], {value}, [%r14];\n" + wait
        words = 8 * size * count
        body += "st.global.u32 [%d1], %r6; add.u64 %d1, %d1, 128;" + _dump(words)
        found.append(_of_ctas(f"st.async{vector}.{kind}", body, 2, 1 + words // 32))
    for operation, kinds in _SCALARS.items():
        for kind in kinds.split():
            wide = kind == "u64"
            body = _fill("77") + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {256 if wide else 128};"
            body += "ld.shared.b32 %r20, [%r2]; rem.u32 %r20, %r20, 150;" + "cvt.u64.u32 %d20, %r20;" * wide
            body += f"mad.lo.u32 %r7, %r0, {8 if wide else 4}, %r13;"
            body += f"red.async.relaxed.cluster.shared::cluster.{bytes_}.{operation}.{kind} [%r7], "
            body += f"{'%d20' if wide else '%r20'}, [%r14];\n" + wait
            body += "st.global.u32 [%d1], %r6; add.u64 %d1, %d1, 128;" + _dump(64)
            found.append(_of_ctas(f"red.async.{operation}.{kind}", body, 2, 3))
    return found


def multicasts() -> list[Case]:
    """One CTA's bulk copy to several; and copies between two CTAs' shared memories."""
    found = []
    for size, ranks in ((2, 0b11), (2, 0b10), (4, 0b1111), (4, 0b0101), (4, 0b1010)):
        for sender in (0, size - 1):
            bytes_ = 240
            body = _fill() + f"mov.u16 %h1, {ranks}; mov.u32 %r20, {ranks}; shr.u32 %r20, %r20, %r11;"
            body += "and.b32 %r20, %r20, 1; setp.eq.u32 %p5, %r20, 1; and.pred %p6, %p5, %p1;\n"
            body += f"@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {bytes_};" + _MEET
            body += f"setp.eq.u32 %p6, %r11, {sender}; and.pred %p6, %p6, %p1;"
            body += "@%p6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            body += f" [%r8+16], [%d0+32], {bytes_}, [%r10], %h1;\nmov.u32 %r6, 2; @!%p5 bra NONE;\n"
            body += bounded_wait("W", 0) + "NONE: " + _MEET
            body += "st.global.u32 [%d1], %r6; add.u64 %d1, %d1, 128;" + _dump(96)
            found.append(_of_ctas(f"bulk.multicast{size}.{ranks:b}.from{sender}", body, size, 4))
    wait = bounded_wait("W", 0).replace("_wait.parity.", "_wait.parity.acquire.cluster.")
    reduced = [(op, kind) for op, kinds in _SCALARS.items() for kind in kinds.split()]
    for operation, kind in [("", ""), *reduced]:
        name, how = ("cp.reduce", f".{operation}.{kind}") if operation else ("cp", "")
        body = _fill("77" if operation else "") + "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 208;"
        body += f"@%p1 {name}.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{how}"
        body += " [%r13+32], [%r1+16], 208, [%r14];\n" + wait
        body += "st.global.u32 [%d1], %r6; add.u64 %d1, %d1, 128;" + _dump(64)
        inputs = np.random.default_rng(52).integers(0, 150, 512, np.uint32)
        found.append(_of_ctas(f"bulk.exchange{how}", body, 2, 3, inputs))
    return found


_GLOBAL = (
    ("add", "u32", "uint32"), ("add", "s32", "int32"), ("add", "u64", "uint64"), ("add", "f32", "float32"),
    ("add", "f64", "float64"), ("add.noftz", "f16", "float16"), ("add.noftz", "bf16", "bfloat16"),
    ("min", "s32", "int32"), ("max", "u64", "uint64"), ("min", "s64", "int64"), ("min", "f16", "float16"),
    ("max", "bf16", "bfloat16"), ("inc", "u32", "uint32"), ("dec", "u32", "uint32"), ("and", "b64", "uint64"),
    ("or", "b32", "uint32"), ("xor", "b64", "uint64"),
)  # fmt: skip


def global_copies() -> list[Case]:
    """Bulk copies of one dimension into shared memory, and out of it, and reductions in global memory."""
    found = []
    for bytes_ in (16, 48, 1008):
        for space in ("cta", "cluster"):
            body = _fill() + f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {bytes_};"
            body += f"@%p1 cp.async.bulk.shared::{space}.global.mbarrier::complete_tx::bytes"
            body += f" [%r8+16], [%d0+16], {bytes_}, [%r10];\n" + bounded_wait("W", 0)
            body += "st.global.u32 [%d1], %r6; add.u64 %d1, %d1, 128;" + _dump(256)
            found.append(_of_ctas(f"bulk.load.{space}.{bytes_}", body, 1, 9))
        body = _fill() + "@!%p1 bra DONE;"
        body += f"cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1+16], {bytes_};"
        body += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE: bar.warp.sync -1;\n"
        found.append(_of_ctas(f"bulk.store.{bytes_}", body, 1, 9))
    for operation, kind, element in _GLOBAL:
        size = 8 if element == "float64" else moderate(element, 4, 0).dtype.itemsize
        if element == "float64":
            random = np.random.default_rng(53)
            before, values = (random.standard_normal(128).view("u8") for _ in range(2))
        else:
            before, values = (moderate(element, 1024 // size, seed) for seed in (54, 55))
        body = _fill() + "@!%p1 bra DONE;"
        body += f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind} [%d1], [%r1], 1008;"
        body += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE: bar.warp.sync -1;\n"
        text = kernel(_SETUP.replace("ROWS", "256").replace("COUNT", "1") + body + _MEET, 2, _SHARED)
        name, dtype = f"bulk.reduce.{operation}.{kind}", before.dtype.str[1:]
        found.append(Case(name, text, (values,), before.shape, dtype, threads=32, before=before))
    return found
