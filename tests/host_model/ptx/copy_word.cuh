// Asynchronous copies of a word.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void copy_async_4(u32 shared_dst, const void* global_src, u32 bytes, int line = __builtin_LINE()) {
  host::copy_async_4(shared_dst, global_src, bytes, line);
}

}  // namespace ptx
