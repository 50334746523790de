// Reductions over a warp. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// The sum over all lanes; every lane of the warp calls.
DSA_DEVICE u32 warp_sum(u32 value) {
  u32 out;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(out) : "r"(value));
  return out;
}

}  // namespace ptx
