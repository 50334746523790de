// Values that the compiler is to keep rather than compute anew. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// The same value, in a register: what it was made of is not known any more.
DSA_DEVICE u32 opaque(u32 x) {
  u32 out;
  asm volatile("mov.b32 %0, %1;" : "=r"(out) : "r"(x));
  return out;
}

}  // namespace ptx
