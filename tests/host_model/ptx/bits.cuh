// Positions of bits.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 highest_bit(u32 x) { return x == 0 ? 0xffffffffu : 31u - static_cast<u32>(__builtin_clz(x)); }

}  // namespace ptx
