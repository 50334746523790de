// Canonical fp32 numbers. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// The bits of x + 0: -0 becomes +0, and every NaN 0x7fffffff.
DSA_DEVICE u32 canonical_bits(u32 x) {
  u32 out;
  asm("{\n .reg .f32 x;\n mov.b32 x, %1;\n add.rn.f32 x, x, 0f00000000;\n mov.b32 %0, x;\n}" : "=r"(out) : "r"(x));
  return out;
}

}  // namespace ptx
