// Atomic operations on shared memory.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void shared_add(u32 address, u32 value, int line = __builtin_LINE()) {
  host::shared_update(address, value, true, "shared_add", line);
}

DSA_DEVICE void shared_or(u32 address, u32 bits, int line = __builtin_LINE()) {
  host::shared_update(address, bits, false, "shared_or", line);
}

DSA_DEVICE u32 shared_fetch_add(u32 address, u32 value, int line = __builtin_LINE()) {
  return host::shared_update(address, value, true, "shared_fetch_add", line);
}

}  // namespace ptx
