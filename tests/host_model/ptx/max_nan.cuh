// The larger of two numbers, with NaN going through.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE float max_nan(float a, float b) {
  if (a != a || b != b) return __builtin_nanf("");
  return a > b ? a : b;
}

}  // namespace ptx
