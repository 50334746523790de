// fp32 operations that round once; the host compiler is told not to contract.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE float add_rn(float a, float b) { return a + b; }
DSA_DEVICE float mul_rn(float a, float b) { return a * b; }
DSA_DEVICE float div_rn(float a, float b) { return a / b; }

}  // namespace ptx
