// Shifts over two words.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 push_top_bit(u32 bits, u32 next) { return bits << 1 | next >> 31; }

}  // namespace ptx
