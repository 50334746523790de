"""Lanes, warps, barriers, copies and matrices, and what the machine says of a kernel that does what it must not."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from micro import kernel, launch

from dsagen.emulator import Memory, coverage
from dsagen.errors import EmulatorError

RANDOM = np.random.default_rng(5)
OUT = "ld.param.u64 %d0, [p0];\nmad.wide.u32 %d0, %r0, 4, %d0;\n"
STORE = "\nst.global.u32 [%d0], %r9;\n"
SHARED = ".shared .align 16 .b8 tile[4096];\n"
# Address of the thread's word of the tile, and of its neighbour's in the next warp.
WORD = "mov.u32 %r1, tile;\nshl.b32 %r2, %r0, 2;\nadd.u32 %r2, %r1, %r2;\n"


def words(body: str, count: int = 32, declarations: str = "", **options: int) -> list[int]:
    """`body` leaves a word in %r9 of each thread."""
    memory, out = Memory(), np.zeros(count, np.uint32)
    options.setdefault("threads", count)
    launch(kernel(OUT + body + STORE, 1, declarations), [memory.add("out", out)], memory, **options)
    return out.tolist()


def fault(body: str, declarations: str = SHARED, threads: int = 32, **options: int) -> str:
    with pytest.raises(EmulatorError) as caught:
        words(body, threads, declarations, **options)
    return str(caught.value)


# ---- control flow ---------------------------------------------------------------------------------------------------


def test_lanes_part_and_meet_again() -> None:
    body = """
    mov.u32 %r9, 0; mov.u32 %r3, 0;
    and.b32 %r4, %r0, 7;
    LOOP: setp.ge.u32 %p1, %r3, %r4;
    @%p1 bra DONE;
    add.u32 %r9, %r9, %r3; add.u32 %r3, %r3, 1;
    bra LOOP;
    DONE: vote.sync.ballot.b32 %r5, 1, 0xffffffff;
    popc.b32 %r5, %r5; mad.lo.u32 %r9, %r9, 100, %r5;
    """
    assert words(body) == [100 * sum(range(n % 8)) + 32 for n in range(32)]


def test_a_scope_has_its_own_registers_and_labels() -> None:
    part = "{ .reg .b32 x; mov.u32 x, %r0; AGAIN: add.u32 x, x, 1; setp.lt.u32 %p1, x, 40; @%p1 bra AGAIN;"
    body = f"mov.u32 %r9, 0;\n{part} add.u32 %r9, %r9, x; }}\n{part} add.u32 %r9, %r9, x; }}"
    assert words(body) == [80] * 32


def test_a_guarded_result_keeps_the_other_lanes_values() -> None:
    assert words("mov.u32 %r9, 5; setp.lt.u32 %p1, %r0, 4; @%p1 mov.u32 %r9, 7; @!%p1 add.u32 %r9, %r9, 1;") == (
        [7] * 4 + [6] * 28
    )


def test_local_and_const_memory() -> None:
    body = """
    .local .align 16 .b8 spill[16];
    mov.u64 %d5, spill; cvta.local.u64 %d5, %d5;
    st.local.u32 [spill+4], %r0; ld.u32 %r3, [%d5+4];
    mov.u64 %d6, table; and.b32 %r4, %r0, 3; mad.wide.u32 %d6, %r4, 2, %d6; ld.const.u16 %r5, [%d6];
    mad.lo.u32 %r9, %r3, 1000, %r5;
    """
    assert words(body, declarations=".const .align 4 .b16 table[4] = {11, 22, 33, 44};") == [
        1000 * n + 11 * (n % 4 + 1) for n in range(32)
    ]


# ---- lanes of a warp ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("shfl.sync.bfly.b32 %r9, %r0, 5, 31, 0xffffffff;", lambda n: n ^ 5),
        ("shfl.sync.idx.b32 %r9, %r0, 3, 31, 0xffffffff;", lambda n: 3),
        ("shfl.sync.up.b32 %r9|%p1, %r0, 4, 0, 0xffffffff;", lambda n: n - 4 if n >= 4 else n),
        ("shfl.sync.down.b32 %r9, %r0, 4, 31, 0xffffffff;", lambda n: n + 4 if n < 28 else n),
        ("shfl.sync.down.b32 %r9, %r0, 1, 0x181f, 0xffffffff;", lambda n: n + 1 if n % 8 < 7 else n),
        ("and.b32 %r3, %r0, 3; match.any.sync.b32 %r9, %r3, 0xffffffff;", lambda n: 0x11111111 << n % 4),
        ("redux.sync.add.u32 %r9, %r0, 0xffffffff;", lambda n: 496),
        ("setp.gt.u32 %p1, %r0, 29; vote.sync.ballot.b32 %r9, %p1, 0xffffffff;", lambda n: 3 << 30),
        ("elect.sync %r3|%p1, 0xffffffff; selp.u32 %r9, 1, %r3, %p1;", lambda n: int(n == 0)),
        ("activemask.b32 %r9;", lambda n: 0xFFFFFFFF),
    ],
)
def test_lanes_together(text: str, want: object) -> None:
    assert callable(want)
    assert words(text) == [want(n) for n in range(32)]


def test_a_shuffle_waits_for_lanes_on_another_path() -> None:
    body = """
    mov.u32 %r3, %r0; setp.lt.u32 %p1, %r0, 16; @!%p1 bra OTHER;
    add.u32 %r3, %r3, 100;
    OTHER: shfl.sync.bfly.b32 %r9, %r3, 16, 31, 0xffffffff;
    """
    assert words(body) == [n + 16 if n < 16 else n - 16 + 100 for n in range(32)]


def test_a_shuffle_that_some_lanes_never_reach() -> None:
    body = "setp.lt.u32 %p1, %r0, 16; @%p1 ret; shfl.sync.bfly.b32 %r9, %r0, 1, 31, 0xffffffff;"
    assert "lanes 0xffff take part but have exited" in fault(body)


def products(kind: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype)
    c, out = torch.randn(16, 8), torch.zeros(16, 8)
    memory = Memory()
    addresses = [memory.add(f"m{n}", tensor) for n, tensor in enumerate((a, b.T.contiguous(), c, out))]
    body = "\n".join(f"ld.param.u64 %d{n}, [p{n}];" for n in range(4)) + "\n"
    body += SHARED + "mov.u32 %r1, tile;\nshr.u32 %r3, %r0, 2;\nand.b32 %r4, %r0, 3;\n"
    # A through shared memory by ldmatrix: lane l copies half a row, matrix l / 8 starts at row l % 8 (+ 8), dim 0 or 8.
    body += """
    mad.wide.u32 %d5, %r0, 16, %d0; ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%d5];
    mad.lo.u32 %r5, %r0, 16, %r1; st.shared.v4.b32 [%r5], {%r10, %r11, %r12, %r13};
    bar.warp.sync 0xffffffff;
    and.b32 %r6, %r0, 15; shr.u32 %r7, %r0, 4; mad.lo.u32 %r6, %r6, 32, %r1; mad.lo.u32 %r6, %r7, 16, %r6;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r6];
    mad.wide.u32 %d6, %r3, 32, %d1; mad.wide.u32 %d6, %r4, 4, %d6;
    ld.global.b32 %r14, [%d6]; ld.global.b32 %r15, [%d6+16];
    mul.wide.u32 %d7, %r3, 32; mad.wide.u32 %d7, %r4, 8, %d7;
    add.u64 %d8, %d2, %d7; ld.global.v2.b32 {%r20, %r21}, [%d8]; ld.global.v2.b32 {%r22, %r23}, [%d8+256];
    """
    body += f"""
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
      {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r20, %r21, %r22, %r23}};
    add.u64 %d8, %d3, %d7; st.global.v2.b32 [%d8], {{%r20, %r21}}; st.global.v2.b32 [%d8+256], {{%r22, %r23}};
    """
    launch(kernel(body, 4), addresses, memory)
    torch.testing.assert_close(out, (a.double() @ b.double() + c).float(), rtol=1e-5, atol=1e-5)


def test_matrix_products() -> None:
    products("f16", torch.float16)
    products("bf16", torch.bfloat16)


def test_transposed_matrix_load() -> None:
    body = (
        WORD
        + """
    mad.lo.u32 %r3, %r0, 2, %r1;
    cvt.u16.u32 %h1, %r0; st.shared.u16 [%r3], %h1; add.u32 %r4, %r0, 32; cvt.u16.u32 %h2, %r4;
    st.shared.u16 [%r3+64], %h2; bar.warp.sync 0xffffffff;
    and.b32 %r5, %r0, 7; mad.lo.u32 %r5, %r5, 16, %r1;
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r9}, [%r5];
    """
    )
    matrix = np.arange(64).reshape(8, 8).T
    want = [int(matrix[n // 4, 2 * (n % 4)] | matrix[n // 4, 2 * (n % 4) + 1] << 16) for n in range(32)]
    assert words(body, declarations=SHARED) == want


# ---- CTAs -----------------------------------------------------------------------------------------------------------


def test_barriers_and_their_votes() -> None:
    body = (
        WORD
        + """
    st.shared.u32 [%r2], %r0; barrier.sync 3, 64;
    xor.b32 %r3, %r0, 32; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r9, [%r3];
    setp.eq.u32 %p1, %r0, 40; barrier.red.or.pred %p2, 1, 64, %p1; bar.red.popc.u32 %r4, 2, %p1;
    selp.u32 %r5, 1000, 0, %p2; add.u32 %r9, %r9, %r5; mad.lo.u32 %r9, %r4, 10000, %r9;
    """
    )
    for seed in range(3):
        assert words(body, 64, SHARED, seed=seed) == [(n ^ 32) + 11000 for n in range(64)]


def test_atomics_over_ctas_and_threads() -> None:
    memory, total = Memory(), np.zeros(2, np.uint32)
    body = "ld.param.u64 %d0, [p0]; atom.global.add.u32 %r3, [%d0], 1; red.global.max.u32 [%d0+4], %r0;"
    launch(kernel(body), [memory.add("total", total)], memory, grid=50, threads=64, os_threads=2)
    assert total.tolist() == [3200, 63]


def test_atomics_in_shared_memory() -> None:
    body = "mov.u32 %r3, tile; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [%r3], 5; bar.sync 0;\n"
    body += "atom.shared.add.u32 %r4, [%r3], 2; bar.sync 0; ld.shared.u32 %r9, [%r3];"
    assert words(body, 64, SHARED) == [5 + 128] * 64


COPY = (
    WORD
    + """
ld.param.u64 %d1, [p1]; mad.wide.u32 %d1, %r0, 16, %d1; shl.b32 %r4, %r0, 4; add.u32 %r4, %r1, %r4;
setp.lt.u32 %p1, %r0, 30; selp.u32 %r5, 16, 0, %p1;
cp.async.cg.shared.global [%r4], [%d1], 16, %r5; cp.async.commit_group;
"""
)


def copied(body: str, **options: int) -> list[int]:
    memory, out, source = Memory(), np.zeros(32, np.uint32), np.arange(128, dtype=np.uint32)
    addresses = [memory.add("out", out), memory.add("source", source, writable=False)]
    launch(kernel(SHARED + OUT + body + "ld.shared.u32 %r9, [%r4+4];" + STORE, 2), addresses, memory, **options)
    return out.tolist()


def test_copies_in_groups() -> None:
    for seed in range(4):
        assert copied(COPY + "cp.async.wait_group 0;", seed=seed) == [4 * n + 1 if n < 30 else 0 for n in range(32)]


def test_a_copy_that_is_not_waited_for() -> None:
    for seed in range(3):
        with pytest.raises(EmulatorError, match=r"asynchronous copy has not been waited for|had copied asynchronously"):
            copied(COPY + "cp.async.wait_group 1;", seed=seed)


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_bounds_name_the_buffer_and_the_distance() -> None:
    found = fault("add.u64 %d0, %d0, 64; mov.u32 %r9, 1;")
    assert "write of 4 bytes at global address" in found
    assert "0 bytes past the end of buffer out" in found
    assert "thread 16 (warp 0, lane 16)" in found
    assert "PTX line" in found


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("st.shared.u32 [tile+4096], %r0;", "write of 4 bytes at shared byte 4096: the CTA has 4096"),
        (WORD + "ld.shared.u32 %r9, [%r2];", "not written before"),
        (WORD + "st.shared.u32 [%r2+2], %r0;", "misaligned"),
        ("mov.u64 %d1, 64; ld.global.u32 %r9, [%d1];", "bytes before buffer out"),
        ("ld.param.u64 %d1, [p0+8];", "parameter byte 8: there are 8"),
        ("mbarrier.arrive.shared.b64 %d1, [tile];", "no mbarrier was initialised at shared byte 0"),
        ("trap;", "trap"),
        ("bar.sync 0, 40;", "40 threads are no positive multiple of 32"),
        ("bar.sync 16;", "there are barriers 0 to 15"),
        ("frobnicate.sync.b32 %r9, %r0;", "frobnicate.sync.b32: the emulator does not have this instruction"),
    ],
)
def test_faults_are_named(body: str, said: str) -> None:
    assert said in fault(body)
    # The process is as good as before.
    assert words("mov.u32 %r9, 3;") == [3] * 32


def test_an_unknown_instruction_that_does_not_run_is_no_fault() -> None:
    body = "mov.u32 %r9, 1; setp.eq.u32 %p1, %r0, 99; @%p1 frobnicate.b32 %r9, %r0;"
    assert words(body) == [1] * 32
    assert coverage(kernel(body)) == {"frobnicate.b32": 1}


def test_a_race_names_both_places() -> None:
    body = WORD + "st.shared.u32 [%r2], %r0;\nxor.b32 %r3, %r0, 32;\nmad.lo.u32 %r3, %r3, 4, %r1;\n"
    body += "ld.shared.u32 %r9, [%r3];"
    found = fault(body, threads=64)
    assert "not written before" in found or "race: read of shared byte" in found
    later = fault(body.replace("ld.shared", "bar.sync 0;\nld.shared") + "\nst.shared.u32 [%r2], %r9;", threads=64)
    place = r"shared bytes \d+ to \d+, which CTA \(0, 0, 0\) warp [01], lane \d+ (reads|writes)"
    assert re.search(rf"race: (read|write) of {place} \(PTX line \d+\); nothing orders the two", later)
    assert len(re.findall(r"PTX line \d+", later)) == 2
    assert words(body.replace("ld.shared", "bar.sync 0;\nld.shared"), 64, SHARED) == [n ^ 32 for n in range(64)]


def test_a_missing_thread_at_a_barrier_is_a_deadlock() -> None:
    found = fault("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64;", threads=64)
    assert "deadlock in CTA (0, 0, 0)" in found
    assert "warp 0, lanes 0xffffffff: at barrier 1, 32 threads have arrived of 64, PTX line" in found


def test_counts_at_a_barrier_disagree() -> None:
    found = fault("setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 96; @!%p1 bar.sync 1, 64;", threads=64)
    assert "barrier 1: 64 threads are expected here, 96 by those who have arrived" in found


def test_a_reduction_does_not_meet_a_plain_barrier() -> None:
    found = fault("setp.lt.u32 %p1, %r0, 32; @%p1 bar.red.or.pred %p2, 1, %p1; @!%p1 bar.sync 1;", threads=64)
    assert "barrier 1: a reduction and something else meet" in found


def test_too_many_arrivals_at_an_mbarrier() -> None:
    body = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [tile], 31; bar.warp.sync 0xffffffff;\n"
    body += "mbarrier.arrive.shared.b64 _, [tile];\nmbarrier.arrive.noComplete.shared.b64 _, [tile];"
    assert "does not have this instruction" in fault(body)
    body = "setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [tile], 31; bar.warp.sync 0xffffffff;\n"
    assert "whose phase waits for 31" in fault(body + "mbarrier.arrive.shared.b64 _, [tile], 32;")


def test_a_loop_without_an_end_is_a_livelock() -> None:
    assert "livelock: CTA (0, 0, 0) ran" in fault("FOREVER: bra FOREVER;", instruction_limit=100000)


def test_what_the_grid_before_writes_is_closed_until_the_wait() -> None:
    text = "ld.param.u64 %d0, [p0]; griddepcontrol.wait; ld.global.u32 %r3, [%d0]; st.global.u32 [%d0+4], %r3;"
    memory, data = Memory(), np.array([7, 0], np.uint32)
    address = memory.add("partial", data, after_wait=True)
    launch(kernel(text), [address], memory)
    assert data.tolist() == [7, 7]
    with pytest.raises(EmulatorError, match=r"ahead of griddepcontrol\.wait"):
        launch(kernel(text.replace("griddepcontrol.wait;", "")), [address], memory)


def test_windows_of_a_large_pool() -> None:
    memory, low, high = Memory(), np.array([1], np.uint32), np.array([2], np.uint32)
    base = memory.add("low", low, address=1 << 40)
    memory.add("high", high, address=(1 << 40) + (9 << 30))
    text = "ld.param.u64 %d0, [p0]; mov.u64 %d1, 9663676416; add.u64 %d1, %d0, %d1;"
    text += "ld.global.u32 %r3, [%d1]; st.global.u32 [%d0], %r3;"
    launch(kernel(text), [base], memory)
    assert low.tolist() == [2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grid": 0}, "expected one to three positive sizes"),
        ({"threads": 2000}, "the limit is 1024"),
        ({"smem": -1}, "-1 bytes of dynamic shared memory"),
        ({"arguments": 2}, "16 bytes of arguments, the kernel takes 8"),
    ],
)
def test_launches_that_do_not_fit(change: dict[str, int], said: str) -> None:
    addresses = [0] * change.pop("arguments", 1)
    with pytest.raises(EmulatorError, match=said):
        launch(kernel(""), addresses, Memory(), **change)


def test_buffers_that_cannot_be_registered() -> None:
    memory = Memory()
    memory.add("a", np.zeros(8), address=4096)
    with pytest.raises(EmulatorError, match="lies inside of buffer a"):
        memory.add("b", np.zeros(8), address=4100)
    with pytest.raises(EmulatorError, match="not contiguous"):
        memory.add("c", np.zeros((4, 4))[:, 1])
    with pytest.raises(EmulatorError, match="neither a numpy array nor a torch tensor"):
        memory.add("d", b"bytes")
    with pytest.raises(EmulatorError, match="not contiguous"):
        memory.add("e", torch.zeros(4, 4)[:, 1])


@pytest.mark.parametrize("text", [".entry", "mov.u32 %r1", ".visible .entry k() { @%q mov.u32 %r1, 1; }"])
def test_text_that_is_no_ptx(text: str) -> None:
    with pytest.raises(EmulatorError):
        launch(text, [], Memory())
