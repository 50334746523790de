// Bulk asynchronous copies that complete on transaction barriers.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE bool elect_one(int line = __builtin_LINE()) {
  host::collective(host::Op::kElectOne, line);
  return host::exchange().out[0] != 0;
}

DSA_DEVICE void fence_mbarrier_init(int line = __builtin_LINE()) { host::fence_mbarrier_init(line); }

DSA_DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes, int line = __builtin_LINE()) {
  host::mbarrier_arrive_expect(barrier, bytes, line);
}

DSA_DEVICE void fence_proxy_async(int line = __builtin_LINE()) { host::fence_proxy_async(line); }

DSA_DEVICE void copy_bulk(u32 shared_dst, const void* global_src, u32 bytes, u32 barrier, int line = __builtin_LINE()) {
  host::copy_bulk(shared_dst, global_src, bytes, barrier, line);
}

}  // namespace ptx
