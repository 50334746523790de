"""What lanes do together, at the edges of segments, and the phases of an mbarrier."""

from __future__ import annotations

import numpy as np
from micro import kernel

from calibration.case import Case

_ADDRESSES = "ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mad.wide.u32 %d0, %r0, 4, %d0;\n"
_ADDRESSES += "mad.wide.u32 %d1, %r0, 4, %d1; ld.global.b32 %r20, [%d0];\n"


def _of_a_warp(name: str, results: list[str], declarations: str = "", before: str = "") -> Case:
    """A kernel whose n-th text leaves a word of each lane in %r21."""
    body = _ADDRESSES + before
    body += "".join(f"{text} st.global.b32 [%d1+{128 * n}], %r21;\n" for n, text in enumerate(results))
    source = np.random.default_rng(21).integers(0, 1 << 32, 32, np.uint32)
    return Case(name, kernel(body, 2, declarations), (source,), (len(results), 32), "u4", threads=32)


def shuffles() -> list[Case]:
    """Distances 0 to beyond the warp, clamps and segments of all sizes; the predicate in the result's lowest bit."""
    rows = [(b, c) for b in (0, 1, 5, 16, 31, 32, 40) for c in (0, 31, 0x1F00, 0x1C1F, 0x181F, 0x1007, 0x100C, 0x1E1F)]
    return [
        _of_a_warp(f"shfl.{mode}", [
            f"shfl.sync.{mode}.b32 %r21|%p1, %r20, {b}, {c}, 0xffffffff; selp.u32 %r22, 1, 0, %p1;"
            "and.b32 %r21, %r21, 0xfffffffe; or.b32 %r21, %r21, %r22;"
            for b, c in rows
        ])
        for mode in ("up", "down", "bfly", "idx")
    ]  # fmt: skip


def reductions() -> list[Case]:
    """redux, match and vote over a warp and over parts of it."""
    ops = ("add.u32", "add.s32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32")
    whole = [f"redux.sync.{op} %r21, %r20, 0xffffffff;" for op in ops]
    whole += ["shr.u32 %r22, %r20, 30; match.any.sync.b32 %r21, %r22, 0xffffffff;"]
    whole += ["match.all.sync.b32 %r21|%p1, %r20, 0xffffffff;"]
    whole += ["setp.lt.s32 %p1, %r20, 0; vote.sync.ballot.b32 %r21, %p1, 0xffffffff;"]
    part = "mov.u32 %r21, 0; setp.lt.u32 %p2, %r0, 11; @%p2 redux.sync.{} %r21, %r20, 0x7ff;"
    return [_of_a_warp("redux", whole), _of_a_warp("redux.part", [part.format(op) for op in ops])]


def mbarriers() -> list[Case]:
    """Which parities a wait finds completed, before and after arrivals and bytes."""
    declarations = ".shared .align 8 .b8 bar[8];\n"
    test = "mbarrier.test_wait.parity.shared.b64 %p1, [%r1], {}; selp.u32 %r21, 1, 0, %p1;"
    once = "setp.eq.u32 %p2, %r0, 0; @%p2 {} bar.warp.sync -1;"
    before = "mov.u32 %r1, bar; " + once.format("mbarrier.init.shared.b64 [%r1], 2;")
    steps = ["", "mbarrier.arrive.shared.b64 %d3, [%r1];", "mbarrier.arrive.expect_tx.shared.b64 %d3, [%r1], 16;"]
    steps += ["mbarrier.complete_tx.shared.b64 [%r1], 16;", "mbarrier.arrive.shared.b64 %d3, [%r1], 2;"]
    results = []
    for step in steps:
        doing = once.format(step) if step else ""
        results += [f"{doing} {test.format(0)}", test.format(1)]
    return [_of_a_warp("mbarrier.parity", results, declarations, before)]
