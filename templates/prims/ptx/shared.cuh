// Accesses of shared memory narrower than 4 B, and asynchronous copies of less than 16 B. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 load_shared_1(u32 address) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

DSA_DEVICE u32 load_shared_2(u32 address) {
  u32 x;
  asm volatile("{\n .reg .b16 h;\n ld.shared.u16 h, [%1];\n cvt.u32.u16 %0, h;\n}" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// 8 bytes global -> shared, asynchronous. `bytes` is 8, or 0 to write zeros: the source is then not read, but must still be
// a legal address. Both addresses are multiples of 8.
DSA_DEVICE void copy_async_8(u32 shared_dst, const void* global_src, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_dst), "l"(global_src), "r"(bytes) : "memory");
}

}  // namespace ptx
