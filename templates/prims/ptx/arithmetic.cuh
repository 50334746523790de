// fp32 operations that round once, to nearest even, and that no compiler contracts into others. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE float add_rn(float a, float b) {
  float x;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

DSA_DEVICE float mul_rn(float a, float b) {
  float x;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

DSA_DEVICE float div_rn(float a, float b) {
  float x;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

}  // namespace ptx
