// Positions of bits. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// Position of the highest set bit; 0xffffffff of zero.
DSA_DEVICE u32 highest_bit(u32 x) {
  u32 out;
  asm("bfind.u32 %0, %1;" : "=r"(out) : "r"(x));
  return out;
}

}  // namespace ptx
