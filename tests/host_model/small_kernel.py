"""A kernel of one's own on the machine: a body of some lines, a tile of shared memory, two transaction barriers."""

from __future__ import annotations

import numpy as np
from host import Counts, HostKernel, Memory, read_model

from dsagen.plan import KernelPlan, ParamField, SmemField, Variant, lay_out_params, lay_out_smem
from dsagen.render import inline_headers

THREADS = 64
KERNEL = """
#include "prims/types.cuh"
struct Params { const float* in; float* out; i32 mode; };
struct SharedStorage {
  alignas(16) u8 tile[1024];
  alignas(16) u32 word[64];
  alignas(16) u64 landed[2];
};
#include "prims/ptx/arithmetic.cuh"
#include "prims/ptx/atomic.cuh"
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/copy_group.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/copy_group.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"
#include "prims/ptx/narrow.cuh"
#include "prims/ptx/registers.cuh"
#include "prims/ptx/thread.cuh"
PRELUDE
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
    body: str,
    inputs: np.ndarray | None = None,
    grid: int = 1,
    seed: int = 1,
    pdl: bool = False,
    threads: int = THREADS,
    prelude: str = "",
    arch: str = "sm_90a",
) -> tuple[np.ndarray, Counts]:
    """Run a body of 64 threads of 64 registers; `in` is 256 floats, `out` 256 a block. `prelude` stands before it."""
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
    variant = Variant("model", "test", "small", arch, (("n", 8),))
    plan = KernelPlan(
        variant,
        (),
        (),
        threads,
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
    text = inline_headers(
        KERNEL.replace("SYMBOL", plan.symbol).replace("BODY", body).replace("PRELUDE", prelude), read_model
    )
    memory = Memory()
    source, out = memory.input("in", given), memory.output("out", (grid * 256,), np.float32)
    counts = HostKernel(plan, text).launch(grid, {"in": source, "out": out, "mode": 0}, memory, seed, ("in",))
    return out.copy(), counts


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


def bulk(**changed: str) -> str:
    return "\n".join({**BULK_STEPS, **changed}.values())
