// Atomic additions to shared memory.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void shared_add(u32 address, u32 value, int line = __builtin_LINE()) {
  host::shared_add(address, value, "shared_add", line);
}

DSA_DEVICE u32 shared_fetch_add(u32 address, u32 value, int line = __builtin_LINE()) {
  return host::shared_add(address, value, "shared_fetch_add", line);
}

}  // namespace ptx
