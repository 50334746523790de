"""The machine itself: what each prim computes, and that every kind of fault stops a launch with its name."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from host import COMPILER, FOLDER, Counts, HostKernel, HostModelError, Memory, read_model
from sparse_case import bf16_bits, bf16_value, e4m3_table

from dsagen.plan import KernelPlan, ParamField, SmemField, Variant, lay_out_params, lay_out_smem
from dsagen.render import inline_headers, templates_folder

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

THREADS = 64
KERNEL = """
#include "prims/types.cuh"
struct Params { const float* in; float* out; i32 mode; };
struct SharedStorage {
  alignas(16) u8 tile[1024];
  alignas(16) u32 word[64];
  alignas(16) u64 landed[2];
};
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"
#include "prims/ptx/thread.cuh"
extern "C" __global__ void __launch_bounds__(64, 1) SYMBOL(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u8 dynamic_smem[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const int t = ptx::thread_index(), lane = t % 32;
  const u32 tile = ptx::shared_address(shared.tile);
  const float* in = p.in;
  float* out = p.out + ptx::block_index() * 256;
  BODY
}
"""


def run(
    body: str, inputs: np.ndarray | None = None, grid: int = 1, seed: int = 1, pdl: bool = False
) -> tuple[np.ndarray, Counts]:
    """Run a body of 64 threads; `in` is 256 floats, `out` 256 a block."""
    given = np.arange(256, dtype=np.float32) if inputs is None else inputs
    fields, params_bytes = lay_out_params(
        (
            ParamField("in", "pointer", "", "const float"),
            ParamField("out", "pointer", "", "float"),
            ParamField("mode", "i32", ""),
        )
    )
    smem, smem_bytes = lay_out_smem(
        (
            SmemField("tile", "u8", (1024,), ""),
            SmemField("word", "u32", (64,), ""),
            SmemField("landed", "u64", (2,), ""),
        )
    )
    variant = Variant("model", "test", "small", "sm_90a", (("n", 8),))
    plan = KernelPlan(
        variant,
        "",
        (),
        (),
        THREADS,
        1,
        64,
        smem,
        smem_bytes,
        fields,
        params_bytes,
        "",
        overlaps_previous=pdl,
        guards=(),
    )
    text = inline_headers(KERNEL.replace("SYMBOL", plan.symbol).replace("BODY", body), read_model)
    memory = Memory()
    source, out = memory.input("in", given), memory.output("out", (grid * 256,), np.float32)
    counts = HostKernel(plan, text).launch(grid, {"in": source, "out": out, "mode": 0}, memory, seed, ("in",))
    return out.copy(), counts


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


# A bulk copy of 64 B to the tile, as it should be: 64 B of the tile were read before, by the whole block.
BULK_STEPS = {
    "init": "const u32 landed = ptx::shared_address(&shared.landed[0]); if (t == 0) ptx::mbarrier_init(landed, 1);",
    "show": "if (t == 0) ptx::fence_mbarrier_init();",
    "use": "ptx::barrier_sync(0, 64); ptx::store_shared_4(tile + 4 * t, 7); ptx::warp_sync();"
    "float before = ptx::load_shared_4(tile + 4 * (t ^ 1));",
    "meet": "ptx::barrier_sync(0, 64);",
    "elect": "if (t < 32 && ptx::elect_one()) {",
    "fence": "ptx::fence_proxy_async();",
    "arrive": "ptx::mbarrier_arrive_expect(landed, 64);",
    "copy": "ptx::copy_bulk(tile, in + 4, 64, landed);",
    "end": "}",
    "wait": "ptx::mbarrier_wait(landed, 0);",
    "read": "out[t] = before + ptx::float_of(ptx::load_shared_4(tile + 4 * (t % 16)));",
}


def arrive_by_copies(
    count: int = 64, extra: str = "", wait: str = "ptx::mbarrier_wait(landed, 0);", read: str = ""
) -> str:
    """Each thread copies 16 B and arrives by them; all wait, and read what another thread copied."""
    return f"""
      const u32 landed = ptx::shared_address(&shared.landed[1]);
      if (t == 0) ptx::mbarrier_init(landed, {count});
      ptx::barrier_sync(0, 64);
      ptx::copy_async_16(tile + 16 * t, in + 4 * t, 16);
      {extra}
      ptx::mbarrier_arrive_after_copies(landed);
      {wait}
      {read}
      out[t] = ptx::float_of(ptx::load_shared_4(tile + 16 * (t ^ 33)));
    """


UNWAITED = (
    "not waited for|written by a copy on transaction barrier 0 with no barrier|with no barrier and proxy fence since"
)


def bulk(**changed: str) -> str:
    return "\n".join({**BULK_STEPS, **changed}.values())


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


def test_shuffles_votes_and_barriers() -> None:
    out, counts = run(
        "out[t] = ptx::shuffle(t, 5); out[64 + t] = ptx::shuffle_xor(t, 3); "
        "out[128 + t] = ptx::ballot(lane % 2) == 0xaaaaaaaau;\n"
        "const bool a = ptx::barrier_any(0, 64, t == 40);\nconst bool b = ptx::barrier_any(0, 64, false); "
        "out[192 + t] = a + 2 * b;"
    )
    t = np.arange(64)
    assert np.array_equal(out, np.concatenate([t // 32 * 32 + 5, t ^ 3, np.ones(64), np.ones(64)]))
    assert (counts.barriers, counts.collectives) == (2, 6)


@pytest.mark.parametrize("seed", range(5))
def test_bulk_copies_land_when_waited_for(seed: int) -> None:
    out, _ = run(bulk(), seed=seed)
    assert np.array_equal(out[:64], 7 + 4 + np.arange(64) % 16)


@pytest.mark.parametrize("seed", range(5))
def test_arrivals_by_copies(seed: int) -> None:
    out, _ = run(arrive_by_copies(), seed=seed)
    assert np.array_equal(out[:64], 4 * (np.arange(64) ^ 33))


def test_barrier_phases_hand_a_buffer_to_and_fro() -> None:
    """One warp writes a word per round, the other reads it and frees it: two barriers, phases by parity."""
    out, _ = run("""
      const u32 full = ptx::shared_address(&shared.landed[0]), empty = full + 8;
      if (t == 0) ptx::mbarrier_init(full, 1), ptx::mbarrier_init(empty, 32);
      ptx::barrier_sync(0, 64);
      for (int i = 0; i < 7; ++i) {
        if (t == 0) {
          if (i > 0) ptx::mbarrier_wait(empty, (i - 1) & 1);
          ptx::store_shared_4(tile, 100 + i);
          ptx::mbarrier_arrive(full);
        } else if (t >= 32) {
          ptx::mbarrier_wait(full, i & 1);
          out[32 * i + lane] = ptx::load_shared_4(tile);
          ptx::mbarrier_arrive(empty);
        }
      }
    """)
    assert np.array_equal(out[:224], np.repeat(100 + np.arange(7), 32))


def test_copies_land_when_waited_for() -> None:
    """Two groups; the first is complete while the second is in flight; zero bytes zero-fill."""
    out, _ = run(
        "ptx::copy_async_16(tile + 16 * t, in + 4 * t, t < 16 ? 16 : 0); ptx::copy_async_commit(); "
        "ptx::copy_async_commit();"
        "ptx::copy_async_wait<1>(); out[t] = ptx::float_of(ptx::load_shared_4(tile + 16 * t));"
    )
    assert np.array_equal(out[:64], np.where(np.arange(64) < 16, np.arange(64) * 4, 0))


def mma_by_hand(kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Loads A by ldmatrix and B by ldmatrix.trans from row-major shared tiles, as the PTX manual describes."""
    both = np.concatenate([a.reshape(-1), b.reshape(-1)]).view(np.float32)  # 16x16 and 16x8 16-bit elements
    body = """
      ptx::store_shared_16(tile + 16 * t, t < 48 ? ptx::load_global_16(in + 4 * t) : Words4{});
      ptx::barrier_sync(0, 64);
      const Words4 a = ptx::load_matrix_x4(tile + (lane % 16) * 32 + (lane / 16) * 16);
      u32 b0, b1;
      ptx::load_matrix_x2_trans(b0, b1, tile + 512 + (lane % 16) * 16);
      float d[4] = {1.0f, 2.0f, 3.0f, 4.0f};
      ptx::mma_KIND(d, a.x, a.y, a.z, a.w, b0, b1);
      const int r = lane / 4, c = 2 * (lane % 4);
      if (t < 32) out[r * 8 + c] = d[0], out[r * 8 + c + 1] = d[1],
        out[(r + 8) * 8 + c] = d[2], out[(r + 8) * 8 + c + 1] = d[3];
    """
    out, _ = run(body.replace("KIND", kind), np.concatenate([both, np.zeros(64, np.float32)]))
    return out[:128].reshape(16, 8)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrix_product(kind: str) -> None:
    random = np.random.default_rng(3)
    a, b = random.standard_normal((16, 16)), random.standard_normal((16, 8))
    pack: Callable[[np.ndarray], np.ndarray]
    if kind == "f16":
        pack, value = lambda x: x.astype(np.float16).view(np.uint16), lambda x: x.view(np.float16).astype(np.float64)
    else:
        pack, value = bf16_bits, bf16_value
    start = np.tile([[1.0, 2.0]], (16, 4)) + np.repeat([0, 2], 8)[:, None]
    assert np.abs(mma_by_hand(kind, pack(a), pack(b)) - (start + value(pack(a)) @ value(pack(b)))).max() < 1e-6


def test_transposed_matrix_load() -> None:
    rows = np.arange(4 * 8 * 8, dtype=np.uint16)
    out, _ = run(
        "ptx::store_shared_16(tile + 16 * t, t < 32 ? ptx::load_global_16(in + 4 * t) : Words4{}); "
        "ptx::barrier_sync(0, 64);\n"
        "const Words4 w = ptx::load_matrix_x4_trans(tile + 16 * lane); const u32 v[4] = {w.x, w.y, w.z, w.w};\n"
        "if (t < 32) for (int i = 0; i < 4; "
        "++i) out[64 * i + 2 * t] = v[i] & 0xffff, out[64 * i + 2 * t + 1] = v[i] >> 16;",
        np.concatenate([rows.view(np.float32), np.zeros(128, np.float32)]),
    )
    # Lane l: column l / 4, rows 2 (l % 4) and the next: row-major order of the transposed matrix.
    assert np.array_equal(out, rows.reshape(4, 8, 8).transpose(0, 2, 1).reshape(-1))


def test_conversions() -> None:
    special = [
        0.0,
        -0.0,
        1.0,
        65504.0,
        65520.0,
        1e-7,
        2.0**-24,
        2.0**-25,
        3e38,
        np.inf,
        -np.inf,
        np.nan,
        1.00390625,
        1.01171875,
    ]
    values = np.resize(np.array(special, np.float32), 256)
    body = "out[t] = ptx::float_of(ptx::pack_bf16(in[t], in[t + 1]));"
    bits = run(body, values)[0][:64].view(np.uint32)
    low, high = values[:64], values[1:65]
    nan = np.isnan
    assert np.array_equal(bits & 0xFFFF, np.where(nan(low), 0x7FFF, bf16_bits(low)))
    assert np.array_equal(bits >> 16, np.where(nan(high), 0x7FFF, bf16_bits(high)))
    bits = run(body.replace("pack_bf16", "pack_f16"), values)[0][:64].view(np.uint32)
    with np.errstate(over="ignore"):
        assert np.array_equal(bits & 0xFFFF, np.where(nan(low), 0x7FFF, low.astype(np.float16).view(np.uint16)))
    codes = np.resize(np.arange(256, dtype=np.uint8), 1024).view(np.float32)
    out, _ = run(
        "u32 low, high; ptx::e4m3_to_f16(ptx::bits_of(in[t]), low, high); out[2 * t] = ptx::float_of(low); "
        "out[2 * t + 1] = ptx::float_of(high);",
        codes,
    )
    assert np.array_equal(out[:128].view(np.float16).astype(np.float64), e4m3_table(), equal_nan=True)


def test_exponential_and_logarithm() -> None:
    x = np.resize(
        np.array([0, 1, -1, 0.5, -125.5, -126.0, -126.1, -1e30, 127.9, 128.0, 1e30, -np.inf, np.inf], np.float32), 256
    )
    out, _ = run("out[t] = ptx::exp2_approx(in[t]); out[64 + t] = ptx::log2_approx(in[t]);", x)
    with np.errstate(all="ignore"):
        power = np.exp2(x[:64].astype(np.float64))
        assert np.allclose(out[:64], np.where(power < 2.0**-126, 0, power.astype(np.float32)), rtol=2e-7)
        assert np.allclose(out[64:128], np.log2(x[:64].astype(np.float64)), equal_nan=True)


def test_every_prim_has_a_model() -> None:
    """A prim without a model would only show as a compile error of some unit."""
    name = re.compile(r"^DSA_DEVICE [\w ]+?(\w+)\(", re.MULTILINE)
    for header in sorted((templates_folder() / "prims" / "ptx").glob("*.cuh")):
        model = FOLDER / "ptx" / header.name
        assert model.is_file(), f"{header.name} has no model"
        missing = set(name.findall(header.read_text())) - set(name.findall(model.read_text()))
        assert not missing, f"{header.name}: no model of {sorted(missing)}"
