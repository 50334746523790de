// Atomic additions to global memory. Blocks run one after the other here, so there is nothing to order.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 global_fetch_add(u32* address, u32 value, int line = __builtin_LINE()) {
  u32 before;
  host::load_global(address, &before, 4, "global_fetch_add", line);
  *address = before + value;
  return before;
}

DSA_DEVICE void global_add(u32* address, u32 value, int line = __builtin_LINE()) { global_fetch_add(address, value, line); }

DSA_DEVICE void fence_device() {}

}  // namespace ptx
