"""Launches that stop: steps, registers, shared memory, exact repetition; and CTAs that wait for each other."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from micro import kernel, launch

from dsagen.emulator import Memory, Session
from dsagen.errors import EmulatorError

TILE = ".shared .align 16 .b8 tile[256];\n"
SUM = """
mov.u32 %r1, tile; mad.lo.u32 %r2, %r0, 4, %r1;
add.u32 %r3, %r0, 100;
mul.wide.u32 %d1, %r3, 65537;
setp.lt.u32 %p1, %r0, 7;
st.shared.u32 [%r2], %r3;
bar.sync 0;
xor.b32 %r4, %r0, 32; mad.lo.u32 %r4, %r4, 4, %r1; ld.shared.u32 %r5, [%r4];
ld.param.u64 %d0, [p0]; mad.wide.u32 %d0, %r0, 4, %d0; cvt.u32.u64 %r6, %d1; add.u32 %r5, %r5, %r6;
selp.u32 %r5, 0, %r5, %p1; st.global.u32 [%d0], %r5;
"""
# The last of all CTAs adds up what each has written: {fence} on both sides of the counter.
LAST = """
mov.u32 %r1, %ctaid.x; mov.u32 %r9, %nctaid.x;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2];
shl.b32 %r2, %r1, 6; add.u32 %r2, %r2, %r0; mad.wide.u32 %d3, %r2, 4, %d0;
st.global.u32 [%d3], %r2;
{before}
bar.sync 0;
setp.ne.u32 %p1, %r0, 0;
@%p1 bra COUNTED;
atom{order}.global.add.u32 %r3, [%d1], 1;
mov.u32 %r4, flag; st.shared.u32 [%r4], %r3;
COUNTED: bar.sync 0;
mov.u32 %r4, flag; ld.shared.u32 %r3, [%r4]; add.u32 %r3, %r3, 1;
setp.ne.u32 %p2, %r3, %r9;
@%p2 ret;
{after}
mov.u32 %r5, 0; mov.u32 %r6, 0;
SUM: mad.lo.u32 %r7, %r6, 64, %r0; mad.wide.u32 %d4, %r7, 4, %d0; ld.global.u32 %r8, [%d4];
add.u32 %r5, %r5, %r8; add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, %r9; @%p3 bra SUM;
mad.wide.u32 %d5, %r0, 4, %d2; st.global.u32 [%d5], %r5;
"""
FLAG = ".shared .align 4 .b8 flag[4];\n"
# Every CTA waits until all have come.
GRID = """
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r1, %ctaid.x; mov.u32 %r9, %nctaid.x;
mad.wide.u32 %d2, %r1, 4, %d1; setp.ne.u32 %p1, %r0, 0; @%p1 bra WAITED;
st.global.u32 [%d2], %r1;
atom.release.gpu.global.add.u32 %r3, [%d0], 1;
AGAIN: {sleep} ld.acquire.gpu.global.u32 %r3, [%d0]; setp.lt.u32 %p2, %r3, %r9; @%p2 bra AGAIN;
add.u32 %r4, %r1, 1; rem.u32 %r4, %r4, %r9; mad.wide.u32 %d3, %r4, 4, %d1;
ld.global.u32 %r5, [%d3]; mad.wide.u32 %d4, %r9, 4, %d2; st.global.u32 [%d4], %r5;
WAITED: bar.sync 0;
"""


def open_sum(out: np.ndarray, **options: object) -> Session:
    memory = Memory()
    params = struct.pack("<Q", memory.add("out", out))
    return Session(kernel(TILE + SUM), "k", 1, 64, params, 0, memory, **options)  # type: ignore[arg-type]


def test_steps_registers_and_shared_memory() -> None:
    out = np.zeros(64, np.uint32)
    with open_sum(out) as session:
        line = session.lanes(0, 1).ptx_lines[0]
        assert session.step(0, 1, 4) == 4
        assert session.register("%r3", 0, 1) == tuple(132 + lane for lane in range(32))
        session.step(0, 1, 2)
        assert session.register("%d1", 0, 1) == tuple((132 + lane) * 65537 for lane in range(32))
        assert session.register("%p1", 0, 1) == (0,) * 32
        session.step(0, 1)
        assert struct.unpack_from("<I", session.shared(0), 4 * 40) == (140,)
        # Warp 0 has not moved, and warp 1 stands at the barrier.
        assert session.lanes(0, 0).ptx_lines[0] == line
        assert session.step(0, 1, 5) == 1
        assert session.lanes(0, 1).runnable == 0
        with pytest.raises(EmulatorError, match="register %r5 holds no value where the warp is"):
            session.register("%r5", 0, 1)
        with pytest.raises(EmulatorError, match="uses no register %x"):
            session.register("%x", 0, 1)
        with pytest.raises(EmulatorError, match="warp 2: a CTA has 2"):
            session.step(0, 2)
        with pytest.raises(EmulatorError, match="CTA 1 is not resident"):
            session.lanes(1, 0)
        session.run()
        assert session.finished
    assert out.tolist() == [0 if n < 7 else (n ^ 32) + 100 + ((n + 100) * 65537 & 0xFFFFFFFF) for n in range(64)]
    with pytest.raises(EmulatorError, match="closed"):
        session.turn()


@pytest.mark.parametrize("schedule", ["random", "priorities"])
def test_the_same_seed_stops_at_the_same_places(schedule: str) -> None:
    def places(seed: int) -> list[object]:
        with open_sum(np.zeros(64, np.uint32), seed=seed, schedule=schedule) as session:
            found: list[object] = []
            while session.turn():
                found.append([session.lanes(0, warp).ptx_lines for warp in range(2)])
            return found

    assert places(5) == places(5)
    assert len({str(places(seed)) for seed in range(1, 9)}) > 1


def test_a_session_reports_faults_and_how_to_repeat_them() -> None:
    memory = Memory()
    session = Session(kernel("trap;"), "k", 1, 32, bytes(8), 0, memory, seed=9, schedule="priorities")
    with session, pytest.raises(EmulatorError, match=r"(?s)k: trap.*\(seed 9, schedule priorities, 1 resident\)"):
        session.run()


def last_cta(before: str, after: str, order: str = "", **options: int) -> list[int]:
    ctas = 5
    memory, partial = Memory(), np.zeros(64 * ctas, np.uint32)
    counter, total = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    addresses = [memory.add("partial", partial, initialised=False), memory.add("counter", counter)]
    addresses.append(memory.add("total", total))
    body = FLAG + LAST.format(before=before, after=after, order=order)
    launch(kernel(body, 3), addresses, memory, grid=ctas, threads=64, **options)
    return total.tolist()


SUMS = [sum(64 * cta + n for cta in range(5)) for n in range(64)]


@pytest.mark.parametrize("options", [{}, {"resident": 5}, {"resident": 3, "seed": 4}, {"os_threads": 2}])
@pytest.mark.parametrize(
    ("before", "after", "order"),
    [
        ("membar.gl;", "membar.gl;", ""),
        ("fence.acq_rel.gpu;", "fence.acq_rel.gpu;", ""),
        ("", "", ".acq_rel.gpu"),
        ("fence.sc.sys;", "", ".acquire.gpu"),
    ],
)
def test_the_last_cta_may_read_what_fences_publish(
    before: str, after: str, order: str, options: dict[str, int]
) -> None:
    assert last_cta(before, after, order, **options) == SUMS


@pytest.mark.parametrize(
    ("before", "after", "order"),
    [
        ("", "", ""),
        ("", "membar.gl;", ""),
        ("membar.gl;", "", ""),
        ("membar.cta;", "membar.gl;", ""),
        ("membar.gl;", "membar.cta;", ""),
        ("", "", ".relaxed.gpu"),
        ("", "", ".acq_rel.cta"),
        ("", "", ".release.gpu"),
    ],
)
def test_the_last_cta_may_not_read_what_nothing_publishes(before: str, after: str, order: str) -> None:
    with pytest.raises(
        EmulatorError, match=r"race: (read|atomic access of CTA scope) of bytes \d+ to \d+ of buffer"
    ) as caught:
        last_cta(before, after, order)
    assert len(re.findall(r"CTA \(\d, 0, 0\)", str(caught.value))) == 2
    assert len(re.findall(r"PTX line \d+", str(caught.value))) == 2


def grid_barrier(resident: int, sleep: str = "", **options: int) -> list[int]:
    memory, counter, data = Memory(), np.zeros(1, np.uint32), np.zeros(8, np.uint32)
    addresses = [memory.add("counter", counter), memory.add("data", data)]
    launch(kernel(GRID.format(sleep=sleep), 2), addresses, memory, grid=4, threads=32, resident=resident, **options)
    return data.tolist()[4:]


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"seed": 2}])
@pytest.mark.parametrize("sleep", ["", "nanosleep.u32 20;"])
def test_ctas_wait_for_each_other(sleep: str, options: dict[str, int]) -> None:
    assert grid_barrier(4, sleep, **options) == [1, 2, 3, 0]


@pytest.mark.parametrize("sleep", ["", "nanosleep.u32 20;"])
def test_waiting_for_a_cta_that_is_not_resident(sleep: str) -> None:
    said = r"(?s)livelock: .* of 4 CTAs, those from number 3 on have not started: 3 are resident.*need resident=4.*"
    said += r"warp 0, lanes 0x1: look at byte 0 of buffer counter again and again, PTX line \d+"
    with pytest.raises(EmulatorError, match=said):
        grid_barrier(3, sleep)


def test_a_loop_that_counts_while_it_looks_is_no_livelock() -> None:
    body = "ld.param.u64 %d0, [p0]; mov.u32 %r1, 0;\n"
    body += "AGAIN: ld.volatile.global.u32 %r2, [%d0]; add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 500; @%p1 bra AGAIN;"
    memory = Memory()
    launch(kernel(body), [memory.add("word", np.zeros(1, np.uint32))], memory)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "fair"}, "schedule 'fair': there are turns, random, priorities"),
        ({"resident": 0}, "at least 1"),
        ({"resident": 2, "os_threads": 2}, "take turns on one OS thread"),
        ({"seed": -1}, "a seed has 64 bits"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, int], said: str) -> None:
    with pytest.raises(EmulatorError, match=said):
        launch(kernel(""), [0], Memory(), **options)
