"""What orders accesses and what does not: lanes of a warp, warps, CTAs, proxies, asynchronous copies."""

from __future__ import annotations

import re

import numpy as np
import pytest
from micro import kernel, launch

from dsagen.emulator import Memory
from dsagen.errors import EmulatorError

TILE = ".shared .align 16 .b8 tile[4096];\n.shared .align 8 .b8 bar[16];\n"
WORD = "mov.u32 %r1, tile; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2;\n"
OUT = "ld.param.u64 %d0, [p0]; mad.wide.u32 %d5, %r0, 4, %d0;\n"
NEIGHBOUR = "xor.b32 %r3, %r0, {far}; mad.lo.u32 %r3, %r3, 4, %r1;\n"
BULK = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 64, [%r10];\n"
INIT = "mov.u32 %r10, bar; setp.ne.u32 %p1, %r0, 0; @!%p1 mbarrier.init.shared.b64 [%r10], 1;\n"
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 64;\n"
WAIT = "AGAIN: mbarrier.try_wait.parity{order}.shared.b64 %p3, [%r10], 0; @!%p3 bra AGAIN;\n"


def run(body: str, seeds: int = 4, **options: int) -> None:
    for seed in range(seeds):
        memory = Memory()
        address = memory.add("out", np.zeros(4096, np.uint32))
        launch(kernel(OUT + body, 1, TILE), [address], memory, seed=seed, **options)


def race(body: str, **options: int) -> str:
    with pytest.raises(EmulatorError) as caught:
        run(body, 1, **options)
    return str(caught.value)


def exchange(
    order: str, far: int = 1, store: str = "st.shared.u32 [%r2], %r0;", load: str = "ld.shared.u32 %r4, [%r3];"
) -> str:
    return WORD + NEIGHBOUR.format(far=far) + store + order + load


@pytest.mark.parametrize(
    ("far", "threads", "order"), [(1, 32, "bar.warp.sync -1;"), (1, 64, "bar.sync 0;"), (32, 64, "bar.sync 0;")]
)
def test_what_orders_threads_in_shared_memory(far: int, threads: int, order: str) -> None:
    run(exchange(order, far), threads=threads)


@pytest.mark.parametrize(
    ("far", "order"),
    [
        (1, ""),
        (1, "shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1;"),
        (1, "vote.sync.ballot.b32 %r5, %p1, -1;"),
        (1, "membar.cta;"),
        (32, "bar.warp.sync -1;"),
        (32, "membar.gl;"),
    ],
)
def test_what_does_not_order_threads(far: int, order: str) -> None:
    # Everything has been written once, so that only the order is at fault.
    body = WORD + "st.shared.u32 [%r2], 7; bar.sync 0;" + exchange(order, far).removeprefix(WORD)
    found = race(body, threads=64)
    assert re.search(r"race: (read|write) of shared bytes \d+ to \d+, which CTA \(0, 0, 0\) warp \d, lane \d+", found)
    assert len(re.findall(r"PTX line \d+", found)) == 2


def test_halves_of_a_warp_that_sync_apart() -> None:
    body = WORD + "st.shared.u32 [%r2], %r0; setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW;"
    body += (
        "bar.warp.sync 0xffff0000; bra READ; LOW: bar.warp.sync 0xffff; READ:" + NEIGHBOUR + "ld.shared.u32 %r4, [%r3];"
    )
    run(body.format(far=1))
    assert "race: read of shared bytes" in race(body.format(far=16))


def test_bytes_are_their_own() -> None:
    body = "mov.u32 %r1, tile; add.u32 %r2, %r1, %r0; cvt.u16.u32 %h1, %r0;"
    body += "st.shared.u8 [%r2], %h1; ld.shared.u8 %h2, [%r2];"
    run(body, threads=64)
    assert "race" in race(body.replace("ld.shared.u8 %h2, [%r2];", "and.b32 %r3, %r2, -4; ld.shared.u32 %r4, [%r3];"))


def test_lanes_that_store_the_same_value_to_one_word() -> None:
    run("mov.u32 %r1, tile; st.shared.u32 [%r1], 5;")
    assert "lanes of one store write different values" in race("mov.u32 %r1, tile; st.shared.u32 [%r1], %r0;")


def test_a_race_in_global_memory_of_one_cta() -> None:
    body = "xor.b32 %r3, %r0, 32; mad.wide.u32 %d6, %r3, 4, %d0; st.global.u32 [%d5], %r0; {} ld.global.u32 %r4, [%d6];"
    run(body.format("bar.sync 0;"), threads=64)
    found = race(body.format(""), threads=64)
    assert re.search(r"race: (read|write) of bytes \d+ to \d+ of buffer out, which CTA \(0, 0, 0\) warp", found)


def test_two_ctas_write_one_word() -> None:
    found = race("mov.u32 %r3, %ctaid.x; setp.eq.u32 %p1, %r0, 3; @%p1 st.global.u32 [%d0+16], %r3;", grid=2)
    assert "race: write of bytes 16 to 19 of buffer out, which CTA (0, 0, 0) warp 0, lane 3 writes" in found
    assert "thread 3 (warp 0, lane 3), CTA (1, 0, 0)" in found
    run("mov.u32 %r3, %ctaid.x; red.global.add.u32 [%d0+16], %r3;", grid=3, threads=64)
    assert "atomic" in race("red.global.add.u32 [%d0], 1; ld.global.u32 %r4, [%d0];", threads=64)


@pytest.mark.parametrize(
    ("release", "acquire", "fine"), [("", "", True), (".relaxed.cta", "", False), ("", ".relaxed.cta", False)]
)
def test_mbarriers_order_what_they_release_and_acquire(release: str, acquire: str, fine: bool) -> None:
    body = WORD + "st.shared.u32 [%r2], 7;" + INIT.replace(", 1;", ", 64;") + "bar.sync 0;"
    body += f"st.shared.u32 [%r2], 9; mbarrier.arrive{release}.shared.b64 _, [%r10];\n" + WAIT.format(order=acquire)
    body += NEIGHBOUR.format(far=32) + "ld.shared.u32 %r4, [%r3];"
    if fine:
        run(body, threads=64)
    else:
        assert "race: read of shared bytes" in race(body, threads=64)


def bulk(
    before: str = "",
    init: str = "fence.mbarrier_init.release.cluster;",
    fence: str = "",
    wait: str = WAIT.format(order=""),
) -> str:
    body = WORD + INIT + f"@!%p1 {init}\n" if init else WORD + INIT
    body += before + "bar.sync 0;" + "@%p1 bra WAITING;" + fence + EXPECT + BULK + "WAITING: " + wait
    return body + "ld.shared.u32 %r4, [%r1];"


def test_bulk_copies_and_the_proxies() -> None:
    run(bulk())
    run(bulk(init="fence.proxy.async;"))
    store = "st.shared.u32 [%r2], 7;"
    run(bulk(store, fence="fence.proxy.async;"))
    run(bulk(store + "fence.proxy.async;"))
    # A read needs no fence before the copy that overwrites what was read.
    run(bulk(store + "fence.proxy.async; ld.shared.u32 %r4, [%r2];"))
    assert "proxy: a bulk copy into shared bytes" in race(bulk(store))
    assert "proxy: a bulk copy completes on the mbarrier at shared byte" in race(bulk(init=""))
    for seed in range(4):
        with pytest.raises(EmulatorError, match=r"not been waited for|had copied asynchronously"):
            memory = Memory()
            address = memory.add("out", np.zeros(4096, np.uint32))
            launch(kernel(OUT + bulk(wait=""), 1, TILE), [address], memory, seed=seed)


def test_copies_belong_to_the_lane_that_waits_for_them() -> None:
    copy = WORD + "shl.b32 %r5, %r0, 4; add.u32 %r5, %r1, %r5; mad.wide.u32 %d6, %r0, 16, %d0;"
    copy += "cp.async.cg.shared.global [%r5], [%d6], 16; cp.async.commit_group; cp.async.wait_group 0;"
    copy += "{} ld.shared.u32 %r4, [%r6];"
    own = "mov.u32 %r6, %r5;"
    other = "xor.b32 %r6, %r5, 16;"
    run(copy.format(own))
    run(copy.format("bar.warp.sync -1;" + other))
    assert "had copied asynchronously" in race(copy.format(other))


def test_what_nobody_has_written() -> None:
    memory = Memory()
    address = memory.add("workspace", np.zeros(64, np.uint32), initialised=False)
    with pytest.raises(EmulatorError, match="read of 4 bytes of buffer workspace at byte 0, which nobody has written"):
        launch(kernel(OUT + "ld.global.u32 %r4, [%d5];"), [address], memory)
    launch(kernel(OUT + "st.global.u32 [%d5], %r0;"), [address], memory)
    launch(kernel(OUT + "ld.global.u32 %r4, [%d5];"), [address], memory.after())


def test_a_flag_in_shared_memory() -> None:
    body = WORD + "mov.u32 %r10, bar; setp.eq.u32 %p4, %r0, 0; @%p4 st.shared.u32 [%r10], 0; bar.sync 0;"
    body += "setp.lt.u32 %p1, %r0, 32; @%p1 bra SPIN;"
    body += "st.shared.u32 [%r2], %r0; bar.warp.sync -1; {release} setp.ne.u32 %p2, %r0, 32; @%p2 bra DONE;"
    body += "st.volatile.shared.u32 [%r10], 1; bra DONE;"
    body += "SPIN: ld.volatile.shared.u32 %r4, [%r10]; setp.eq.u32 %p3, %r4, 0; @%p3 bra SPIN; {acquire}"
    body += "add.u32 %r6, %r2, 128; ld.shared.u32 %r7, [%r6]; DONE:"
    run(body.format(release="membar.cta;", acquire="membar.cta;"), threads=64)
    for release, acquire in (("membar.cta;", ""), ("", "membar.cta;")):
        assert "race: read of shared bytes" in race(body.format(release=release, acquire=acquire), threads=64)


def test_a_word_that_other_lanes_access_atomically() -> None:
    """Lane 4 writes where lane 1 does so atomically, and has itself accessed another word last."""
    body = WORD + "st.shared.u32 [%r2], 7; bar.sync 0; xor.b32 %r3, %r0, 4; mad.lo.u32 %r3, %r3, 4, %r1;"
    body += "atom.relaxed.cta.shared.add.u32 %r5, [%r3], 1; xor.b32 %r4, %r0, 1; mad.lo.u32 %r4, %r4, 4, %r1;"
    found = race(body + "st.shared.u32 [%r4], %r0; membar.cta;")
    assert "race: write of shared bytes 4 to 7, which CTA (0, 0, 0) warp 0, lane 5 accesses atomically" in found
    run(body + "bar.warp.sync -1; st.shared.u32 [%r4], %r0; membar.cta;")


# Words in the order in which lanes have them, so that a store fills 16 bytes with words of several lanes.
ORDERS = {
    "in a row": "mov.u32 %r20, %r9;",
    "across": "and.b32 %r20, %r9, 7; shr.u32 %r21, %r9, 3; mad.lo.u32 %r20, %r20, 4, %r21;",
    "backwards": "sub.u32 %r20, 31, %r9;",
}
PIECES = {4: ("u32", "%r50"), 8: ("u64", "%d50"), 16: ("v4.u32", "{%r50, %r51, %r52, %r53}")}


def reach(order: str, size: int, space: str, lane: str) -> tuple[str, str]:
    """What computes the address of a lane's piece of `size` bytes, and its operand; `lane` sets %r9."""
    body = f"{lane} {ORDERS[order]} mul.lo.u32 %r20, %r20, {size}; cvt.u64.u32 %d20, %r20; add.u64 %d20, %d20, %d0;"
    return body + "add.u32 %r20, %r20, %r1;", "[%r20]" if space == "shared" else "[%d20]"


OWN, OTHERS = "and.b32 %r9, %r0, 31;", "xor.b32 %r9, %r0, 9; and.b32 %r9, %r9, 31;"


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("then", ["st", "ld"])
@pytest.mark.parametrize("wide", [False, True])
def test_a_store_that_fills_16_bytes_with_words_of_several_lanes(
    space: str, order: str, size: int, then: str, wide: bool
) -> None:
    """It is kept as one write, of which the lanes stay known: what follows is a race just where it would be one."""
    kind, value = PIECES[size]
    at, operand = reach(order, size, space, OWN)
    first = f"mov.u32 %r1, tile; setp.lt.u32 %p1, %r0, 32; {at} @%p1 st.{space}.{kind} {operand}, {value};"
    later = 16 if wide else size

    def follow(lane: str, guard: str = "%p1") -> str:
        at, operand = reach("in a row" if wide else order, later, space, lane)
        if wide:  # only where the first store has been
            at += f"setp.lt.u32 %p2, %r9, {2 * size}; and.pred %p2, %p2, {guard};"
        kind, value = PIECES[later]
        line = f"st.{space}.{kind} {operand}, {value};" if then == "st" else f"ld.{space}.{kind} {value}, {operand};"
        return f"{at} @{'%p2' if wide else guard} {line}"

    if not wide:
        run(first + follow(OWN), 1)  # the lane itself
    for order_of in ("bar.warp.sync -1;", "bar.sync 0;"):
        run(first + order_of + follow(OTHERS), 1)
    assert "race: " in race(first + follow(OTHERS))
    # Another warp, which knows of it past a barrier only; and again by the first, which does not know of the other.
    second = "setp.ge.u32 %p3, %r0, 32;"
    run(first + "bar.sync 0;" + second + follow(OTHERS, "%p3"), 1, threads=64)
    assert "race: " in race(first + "bar.warp.sync -1;" + second + follow(OTHERS, "%p3"), threads=64)
    last = f"{at} @%p1 st.{space}.{kind} {operand}, {value};"
    body = first + "bar.sync 0;" + second + follow(OTHERS, "%p3")
    assert "race: write of" in race(body + "bar.warp.sync -1;" + last, threads=64)
    run(body + "bar.sync 0;" + last, 1, threads=64)


LAST_BLOCK = """
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r1, %ctaid.x; mov.u32 %r9, %nctaid.x;
mad.wide.u32 %d2, %r1, 4, %d0; setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
st.global.u32 [%d2], %r1; fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 %r2, [%d1], 1; fence.acq_rel.gpu;
sub.u32 %r3, %r9, 1; setp.ne.u32 %p2, %r2, %r3; @%p2 bra DONE;
mov.u32 %r4, 0;
NEXT: mad.wide.u32 %d3, %r4, 4, %d0; ld.global.u32 %r5, [%d3]; add.u32 %r4, %r4, 1;
setp.lt.u32 %p3, %r4, %r9; @%p3 bra NEXT;
DONE:
"""


def test_the_last_block_knows_of_the_others_whatever_the_threads_of_the_host_do() -> None:
    text = kernel(LAST_BLOCK, 2)
    for _ in range(100):
        memory = Memory()
        addresses = [memory.add("out", np.zeros(64, np.uint32)), memory.add("count", np.zeros(1, np.uint32))]
        launch(text, addresses, memory, grid=64, os_threads=4)
    with pytest.raises(EmulatorError, match="race: read of bytes"):
        memory = Memory()
        addresses = [memory.add("out", np.zeros(64, np.uint32)), memory.add("count", np.zeros(1, np.uint32))]
        launch(text.replace("fence.acq_rel.gpu;", ""), addresses, memory, grid=64, os_threads=4)


# ---- what is kept of launches that are over --------------------------------------------------------------------------

# Warp 0 writes shared memory and global memory by pieces of 16, 4 and 1 bytes; later launches take the same memory.
_PIECES = "mov.u32 %r1, tile; setp.ne.u32 %p1, %r0, {lane};\n@%p1 bra E;\n"
_PIECES += "mov.u32 %r2, 1; mov.u32 %r3, 2; cvt.u16.u32 %h1, %r2; st.shared.v4.u32 [%r1], {%r2, %r2, %r3, %r3};"
_PIECES += "st.shared.u32 [%r1+16], %r2; st.shared.u8 [%r1+33], %h1; ld.shared.u32 %r4, [%r1+16];"
_PIECES += "st.global.u32 [%d0], %r2; st.global.u8 [%d0+17], %h1;\nE:\n"


def test_a_launch_knows_nothing_of_those_before_it() -> None:
    def run(body: str) -> None:
        memory = Memory()
        address = memory.add("words", np.zeros(32, np.uint32))
        declarations = ".shared .align 16 .b8 tile[64];\n"
        launch(kernel("ld.param.u64 %d0, [p0];\n" + body, 1, declarations), [address], memory, threads=64)

    clash = _PIECES.replace("{lane}", "0").replace("E", "A") + _PIECES.replace("{lane}", "32").replace("E", "B")
    for _ in range(3):
        for lane in (0, 32, 5, 63):
            run(_PIECES.replace("{lane}", str(lane)))
        # One that ends in the middle of a check leaves nothing either.
        with pytest.raises(EmulatorError, match="race: write of shared bytes"):
            run(clash)
        # What nobody has written in this launch is not there.
        with pytest.raises(EmulatorError, match="not written before"):
            run("mov.u32 %r1, tile; ld.shared.u32 %r2, [%r1+16];")
