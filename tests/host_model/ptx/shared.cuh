// Accesses of shared memory narrower than 4 B, and asynchronous copies of less than 16 B.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 load_shared_1(u32 address, int line = __builtin_LINE()) {
  u8 x;
  host::load_shared(address, &x, 1, "load_shared_1", line);
  return x;
}

DSA_DEVICE u32 load_shared_2(u32 address, int line = __builtin_LINE()) {
  u16 x;
  host::load_shared(address, &x, 2, "load_shared_2", line);
  return x;
}

DSA_DEVICE void copy_async_8(u32 shared_dst, const void* global_src, u32 bytes, int line = __builtin_LINE()) {
  host::copy_async_8(shared_dst, global_src, bytes, line);
}

}  // namespace ptx
