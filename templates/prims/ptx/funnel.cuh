// Shifts over two words. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// `bits` shifted left by one, with the top bit of `next` coming in.
DSA_DEVICE u32 push_top_bit(u32 bits, u32 next) {
  u32 out;
  asm("shf.l.wrap.b32 %0, %1, %2, 1;" : "=r"(out) : "r"(next), "r"(bits));
  return out;
}

}  // namespace ptx
