// Asynchronous copies of a word, for rows that start at multiples of 4 bytes. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// 4 bytes global -> shared, asynchronous, in the groups of copy_async_commit. `bytes` is 4, or 0 to write zeros: the source
// is then not read, but must still be a legal address. Both addresses are multiples of 4.
DSA_DEVICE void copy_async_4(u32 shared_dst, const void* global_src, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_dst), "l"(global_src), "r"(bytes) : "memory");
}

}  // namespace ptx
