// The larger of two numbers, with NaN going through. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// NaN if either is.
DSA_DEVICE float max_nan(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

}  // namespace ptx
