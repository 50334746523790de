// Counters in global memory by which CTAs of one grid wait for each other. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// What this thread knows of before is known to whoever acquires the sum.
DSA_DEVICE void global_add_release(u32* address, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

DSA_DEVICE u32 global_load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Returns the value before the addition.
DSA_DEVICE u32 global_fetch_add_ordered(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

}  // namespace ptx
