// Atomic additions to global memory, and what other blocks see. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void global_add(u32* address, u32 value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Returns the value before the addition.
DSA_DEVICE u32 global_fetch_add(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// Orders this thread's accesses before it and after it, as all blocks see them.
DSA_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace ptx
