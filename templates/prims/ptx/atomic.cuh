// Atomic operations on shared memory. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// No result: what all lanes of a warp add to one word is then combined before it reaches memory.
DSA_DEVICE void shared_add(u32 address, u32 value) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DSA_DEVICE void shared_or(u32 address, u32 bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

// Returns the value before the addition.
DSA_DEVICE u32 shared_fetch_add(u32 address, u32 value) {
  u32 before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
  return before;
}

}  // namespace ptx
