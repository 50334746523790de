"""Every kind of fault stops a launch on the machine, with its name."""

from __future__ import annotations

import numpy as np
import pytest
from host import COMPILER, HostModelError
from small_kernel import BULK_STEPS, arrive_by_copies, bulk, run

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

FAULTS: dict[str, tuple[str, str]] = {
    "no barrier between write and read": (
        "ptx::store_shared_4(tile + 4 * t, t); out[t] = ptx::load_shared_4(tile + 4 * (t ^ 1));",
        r"was never written|was written by thread \d+ with no barrier since|was read by warp \d+ .*with no barrier",
    ),
    "no barrier between read and write": (
        "ptx::store_shared_4(tile + 4 * t, t); ptx::barrier_sync(0, 64);"
        "const u32 x = ptx::load_shared_4(tile + 4 * (t ^ 1)); ptx::store_shared_4(tile + 4 * t, x);",
        r"was (read by warp|written by thread) \d+ .*with no barrier since",
    ),
    "two writers": ("ptx::store_shared_4(tile, t);", r"was written by thread \d+ too"),
    "race on a member": (
        "shared.word[t] = t; out[t] = shared.word[63 - t];",
        r"SharedStorage member .*(was never written|no barrier since)",
    ),
    "matrix load of unordered rows": (
        "ptx::store_shared_16(tile + 16 * t, Words4{}); ptx::load_matrix_x4(tile + 16 * lane);",
        r"load_matrix_x4 .*(never written|no barrier since)",
    ),
    "addition to nothing": ("ptx::shared_add(tile, 1);", "was never written"),
    "addition to what another thread wrote, without a barrier": (
        "if (t == 0) ptx::store_shared_4(tile, 0); ptx::shared_add(tile, 1);",
        r"never written|written by thread 0 with no barrier since",
    ),
    "addition to what another thread read, without a barrier": (
        "ptx::store_shared_4(tile + 4 * t, 0); ptx::barrier_sync(0, 64);"
        "out[t] = ptx::load_shared_4(tile + 4 * t); ptx::shared_add(tile + 4 * (t ^ 40), 1);",
        r"was (read|added to) by warp \d+ .*with no barrier since",
    ),
    "read of what another thread added to, without a barrier": (
        "ptx::store_shared_4(tile + 4 * t, 0); ptx::barrier_sync(0, 64);"
        "ptx::shared_fetch_add(tile + 4 * t, 1); out[t] = ptx::load_shared_4(tile + 4 * (t ^ 1));",
        r"was (read|added to) by warp \d+ .*with no barrier since",
    ),
    "write of what another thread added to, without a barrier": (
        "ptx::store_shared_4(tile + 4 * t, 0); ptx::barrier_sync(0, 64);"
        "ptx::shared_add(tile + 4 * t, 1); ptx::store_shared_4(tile + 4 * (t ^ 33), 1);",
        r"was (added to by warp|written by thread) \d+ .*with no barrier since",
    ),
    "read ordered after the last addition only": (
        "ptx::store_shared_4(tile + 4 * t, 0); ptx::barrier_sync(0, 64); ptx::shared_add(tile, 1);"
        "if (t < 32) { ptx::warp_sync(); out[t] = ptx::load_shared_4(tile); }",
        r"was (read|added to) by warp \d+ .*with no barrier since",
    ),
    "shared read of nothing": ("out[t] = ptx::load_shared_4(tile + 512);", "was never written"),
    "copy not waited for": (
        "ptx::copy_async_16(tile + 16 * t, in + 4 * (t % 32), 16); ptx::copy_async_commit();"
        "out[t] = ptx::load_shared_4(tile + 16 * t); ptx::copy_async_wait<0>();",
        "asynchronous copy of thread \\d+ that was not waited for",
    ),
    "copy waited for too little": (
        "ptx::copy_async_16(tile + 16 * t, in + 4 * (t % 32), 16); ptx::copy_async_commit();"
        "ptx::copy_async_wait<1>(); out[t] = ptx::load_shared_4(tile + 16 * t); ptx::copy_async_wait<0>();",
        "asynchronous copy of thread \\d+ that was not waited for",
    ),
    "copy of another thread without a barrier": (
        "ptx::copy_async_16(tile + 16 * t, in + 4 * (t % 32), 16); ptx::copy_async_commit(); ptx::copy_async_wait<0>();"
        "out[t] = ptx::load_shared_4(tile + 16 * (63 - t));",
        "never written|no barrier since|not waited for",
    ),
    "copy left in flight": (
        "ptx::copy_async_16(tile + 16 * t, in + 4 * (t % 32), 16); ptx::copy_async_commit();",
        r"returns with an asynchronous copy of line \d+ in flight",
    ),
    "copy from a misaligned source": (
        "ptx::copy_async_16(tile + 16 * t, in + 1, 16);",
        "global address .* is not a multiple of 16",
    ),
    "copy to a misaligned target": (
        "ptx::copy_async_16(tile + 16 * t + 4, in, 16);",
        "shared address .* is not a multiple of 16",
    ),
    "copy from past a tensor": (
        "ptx::copy_async_16(tile + 16 * t, in + 256, 16);",
        r"is in no tensor; nearest is in \(1024 B\), at byte 1024",
    ),
    "matrix row misaligned": ("ptx::load_matrix_x4(tile + 8);", "load_matrix_x4 .*is not a multiple of 16"),
    "shared access past the block's": ("ptx::store_shared_4(tile + 4 * 1024 + 4 * t, 0);", "leaves the block's 1296 B"),
    "shared access by a bare offset": ("ptx::store_shared_4(4 * t, 0);", "leaves the block's 1296 B"),
    "global load past a tensor": ("ptx::load_global_16(in + 256 + t * 4);", "load_global_16 .*is in no tensor"),
    "byte load before a tensor": (
        "ptx::load_global_1(reinterpret_cast<const u8*>(in) - 1);",
        "load_global_1 .*in no",
    ),
    "global load misaligned": ("ptx::load_global_8(in + 1);", "load_global_8 .*is not a multiple of 8"),
    "global store past a tensor": ("ptx::store_global_4(out + 256 + t, 0);", "store_global_4 .*nearest is out"),
    "global store across the end": (
        "ptx::store_global_16(out + 254, Words4{});",
        "store_global_16 .*not a multiple",
    ),
    "global store to an input": ("ptx::store_global_1(const_cast<float*>(in), 0);", "in .*it is read-only"),
    "plain read past a tensor": ("out[t] = in[256 + t];", r"plain access .* byte \d+ of in \(1024 B\), is illegal"),
    "plain write before a tensor": ("out[-1024 - t] = 0.0f;", r"plain access .* byte -\d+ of out .* is illegal"),
    "plain write just before a tensor": ("out[-1 - t] = 0.0f;", "out: bytes before it were written"),
    "plain write of an input": ("const_cast<float*>(in)[t] = 0.0f;", "byte .* of in .*it is read-only"),
    "plain read of nowhere": ("out[t] = *reinterpret_cast<const float*>(64);", "is in no tensor"),
    "misaligned plain access": (
        "out[t] = *reinterpret_cast<const u32*>(reinterpret_cast<const u16*>(in) + 1);",
        "undefined behaviour",
    ),
    "member out of bounds": ("shared.word[t + 64] = 0;", "undefined behaviour|leaves|not in shared memory"),
    "shift too far": ("out[t] = 1u << (ptx::shuffle(32, 0) + t);", "undefined behaviour"),
    "diverged warp": (
        "u32 x;\nif (lane < 16) x = ptx::shuffle(t, 0);\nelse x = ptx::shuffle(t, 1);\nout[t] = x;",
        r"the warp diverges, its lane \d+ is in shuffle",
    ),
    "diverged kinds": ("if (lane < 16) ptx::ballot(true); else ptx::shuffle(0, 0);", "the warp diverges"),
    "barrier that some skip": (
        "if (t < 32) ptx::barrier_sync(0, 64);",
        r"deadlock.*\n  warp 0 lanes 0-31 wait in barrier_sync \(line \d+\)\n  warp 1 lanes 0-31 have returned",
    ),
    "barrier of part of a warp": ("if (lane < 16) ptx::barrier_sync(1, 32);", "only part of warp 0"),
    "barriers of two sizes": ("ptx::barrier_sync(2, t < 32 ? 32 : 64);", "threads, others .* expect"),
    "barrier that does not exist": ("ptx::barrier_sync(16, 64);", "barrier 16, there are 0 to 15"),
    "barrier of the own warp only": (
        "ptx::store_shared_4(tile + 4 * t, t); ptx::barrier_sync(1 + t / 32, 32); "
        "out[t] = ptx::load_shared_4(tile + 4 * (63 - t));",
        "never written|no barrier since",
    ),
    "write after a read by a warp that has met no one": (
        "if (t == 40) ptx::store_shared_4(tile, 1); ptx::barrier_sync(0, 64); "
        "if (t >= 32) out[t] = ptx::load_shared_4(tile);"
        "for (int i = 0; i < 3; ++i) ptx::barrier_sync(1 + t / 32, 32); if (t == 0) ptx::store_shared_4(tile, 1);",
        "was (read by warp 1 .*|written by thread 0) with no barrier since",
    ),
    "barriers of two kinds": (
        "if (t < 32) ptx::barrier_sync(0, 64); else ptx::barrier_any(0, 64, true);",
        "of the other kind",
    ),
    "deadlock": (
        "if (t < 32) { if (t < 16) ptx::ballot(true); else ptx::barrier_sync(0, 64); } else ptx::barrier_sync(0, 64);",
        r"deadlock, no thread can run:\n  warp 0 lanes 0-15 wait in ballot \(line \d+\)"
        r"\n  warp 0 lanes 16-31 wait in barrier_sync",
    ),
}

UNWAITED = (
    "not waited for|written by a copy on transaction barrier 0 with no barrier|with no barrier and proxy fence since"
)

FAULTS |= {
    "bulk: no proxy fence": (bulk(fence=""), "copy_bulk .*with no barrier and proxy fence since"),
    "bulk: proxy fence before the barrier": (
        bulk(meet="ptx::fence_proxy_async(); ptx::barrier_sync(0, 64);", fence=""),
        "copy_bulk .*with no barrier and proxy fence since",
    ),
    "bulk: no barrier before the copy": (bulk(meet=""), "copy_bulk .*with no barrier and proxy fence since"),
    "bulk: barrier of one warp before the copy": (
        bulk(meet="ptx::barrier_sync(1 + t / 32, 32);", copy="ptx::copy_bulk(tile + 192, in + 4, 64, landed);"),
        "copy_bulk .*with no barrier and proxy fence since",
    ),
    "bulk: not waited for": (bulk(wait=""), UNWAITED),
    "bulk: waited for by others": (
        bulk(wait="if (t != 5) ptx::mbarrier_wait(landed, 0);"),
        UNWAITED,
    ),
    "bulk: bytes announced that never come": (
        bulk(arrive="ptx::mbarrier_arrive_expect(landed, 80);"),
        r"deadlock.*\n  warp 0 lanes 0-31 wait in mbarrier_wait",
    ),
    "bulk: wrong phase": (
        bulk(wait="ptx::mbarrier_wait(landed, 1);"),
        UNWAITED,
    ),
    "bulk: two arrivals": (
        bulk(arrive=2 * "ptx::mbarrier_arrive_expect(landed, 32);"),
        "more than 1 arrivals in a phase",
    ),
    "bulk: barrier not shown to copies": (bulk(show=""), "no fence made the transaction barrier visible"),
    "bulk: no barrier initialised": (
        bulk(init="const u32 landed = ptx::shared_address(&shared.landed[0]);"),
        "no transaction barrier was initialised at shared offset 1280",
    ),
    "bulk: initialised with no barrier since": (
        "if (t == 0) ptx::mbarrier_init(ptx::shared_address(&shared.landed[0]), 1); "
        "if (t == 0) ptx::fence_mbarrier_init();"
        "if (t == 40) ptx::mbarrier_arrive_expect(ptx::shared_address(&shared.landed[0]), 0);",
        "initialised",
    ),
    "bulk: block ends too early": (bulk(wait="", read=""), r"the block ends with a copy of line \d+ in flight"),
    "bulk: past a tensor": (bulk(copy="ptx::copy_bulk(tile, in + 244, 64, landed);"), "copy_bulk .*is in no tensor"),
    "bulk: misaligned": (bulk(copy="ptx::copy_bulk(tile, in + 2, 64, landed);"), "copy_bulk .*is not a multiple of 16"),
    "copies: stores of the thread are not released with them": (
        arrive_by_copies(
            extra="ptx::store_shared_4(tile + 512 + 4 * t, 9);", read="ptx::load_shared_4(tile + 512 + 4 * (t ^ 1));"
        ),
        "no barrier since|never written",
    ),
    "copies: an arrival short": (arrive_by_copies(count=65), r"deadlock.*\n  warp 0 lanes 0-31 wait in mbarrier_wait"),
    "copies: not waited for": (
        arrive_by_copies(wait=""),
        "not waited for|was written by a copy on .*no barrier|never written",
    ),
    "warp: no sync between lanes": (
        bulk(use=BULK_STEPS["use"].replace("ptx::warp_sync();", "")),
        "never written|no barrier since",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    body, message = FAULTS[fault]
    with pytest.raises(HostModelError, match=message):
        run(body)


# Two warpgroups of 64 registers a thread.
REGISTER_FAULTS = {
    "raised beyond what is given back": (
        "if (t < 128) ptx::registers_lower<40>(); else ptx::registers_raise<96>();",
        r"deadlock.*\n  warp 0 lanes 0-31 have returned(.|\n)* wait in registers_raise",
    ),
    "raised with nothing given back": ("if (t < 128) ptx::registers_raise<72>();", "wait in registers_raise"),
    "lowered too late": (
        "if (t < 128) ptx::registers_raise<88>(); ptx::barrier_sync(0, 256); if (t >= 128) ptx::registers_lower<40>();",
        r"wait in registers_raise(.|\n)* wait in barrier_sync",
    ),
    "part of a warpgroup": ("if (t < 96) ptx::registers_lower<40>();", "warps 0 and 3 of a warpgroup have 40 and 64"),
    "lowered to more": ("ptx::registers_lower<72>();", "registers_lower .*72 registers, the warp has 64"),
    "raised to less": ("ptx::registers_raise<56>();", "registers_raise .*56 registers, the warp has 64"),
    "part of a warp": (
        "if (lane < 16) ptx::registers_lower<40>(); else ptx::registers_lower<48>();",
        "the warp diverges",
    ),
}


@pytest.mark.parametrize("fault", REGISTER_FAULTS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fault_of_registers_is_found(fault: str, seed: int) -> None:
    body, message = REGISTER_FAULTS[fault]
    with pytest.raises(HostModelError, match=message):
        run(body, threads=256, seed=seed)


def test_registers_need_whole_warpgroups() -> None:
    with pytest.raises(HostModelError, match="2 warps are no whole warpgroups"):
        run("ptx::registers_lower<40>();")


@pytest.mark.parametrize("seed", range(5))
def test_registers_move(seed: int) -> None:
    """Who raises waits for those who lower; every block starts afresh."""
    out, _ = run(
        "if (t < 128) ptx::registers_raise<88>(); else ptx::registers_lower<40>(); out[t] = t;",
        grid=2,
        seed=seed,
        threads=256,
    )
    assert np.array_equal(out, np.tile(np.arange(256), 2))


def test_read_before_the_dependency_wait_is_found() -> None:
    out, _ = run("ptx::grid_dependency_wait(); out[t] = in[t];", pdl=True)
    assert np.array_equal(out[:64], np.arange(64))
    with pytest.raises(HostModelError, match="before the dependency wait"):
        run("out[t] = in[t]; ptx::grid_dependency_wait();", pdl=True)
    with pytest.raises(HostModelError, match="reads in before the dependency wait"):
        run("out[t] = ptx::load_global_16(in).x; ptx::grid_dependency_wait();", pdl=True)


def test_a_launch_after_a_fault_works() -> None:
    for body, _ in (FAULTS["plain read past a tensor"], FAULTS["deadlock"], FAULTS["shift too far"]):
        with pytest.raises(HostModelError):
            run(body)
    out, _ = run("out[t] = in[t];", grid=3)
    assert np.array_equal(out.reshape(3, 256)[:, :64], np.tile(np.arange(64), (3, 1)))
