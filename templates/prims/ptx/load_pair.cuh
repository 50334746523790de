// Loads of 8 bytes of shared memory. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// `address` is a multiple of 8.
DSA_DEVICE void load_shared_8(u32& low, u32& high, u32 address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(address) : "memory");
}

}  // namespace ptx
