// Loads of 8 bytes for the CPU model.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void load_shared_8(u32& low, u32& high, u32 address, int line = __builtin_LINE()) {
  u32 words[2];
  host::load_shared(address, words, 8, "load_shared_8", line);
  low = words[0], high = words[1];
}

}  // namespace ptx
