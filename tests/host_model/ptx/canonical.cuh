// Canonical fp32 numbers.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 canonical_bits(u32 x) {
  if ((x & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
  return x == 0x80000000u ? 0 : x;
}

}  // namespace ptx
