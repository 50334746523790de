// Reductions over a warp.
#pragma once
#include "prims/ptx/thread.cuh"

namespace ptx {

DSA_DEVICE u32 warp_sum(u32 value, int line = __builtin_LINE()) { return exchange_two(host::Op::kSum, value, 0, line); }

}  // namespace ptx
