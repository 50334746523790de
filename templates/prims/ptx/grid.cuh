// How large the grid is. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// Blocks of a one-dimensional grid.
DSA_DEVICE u32 grid_blocks() {
  u32 out;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(out));
  return out;
}

}  // namespace ptx
