// Bulk asynchronous copies that complete on transaction barriers. sm_90+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// True in exactly one lane of a fully active warp.
DSA_DEVICE bool elect_one() {
  u32 out;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(out));
  return out != 0;
}

// Makes initialised barriers visible to the asynchronous proxy.
DSA_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives once and adds `bytes` to what the phase waits for.
DSA_DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Generic accesses to shared memory before it are ordered before asynchronous ones after it.
DSA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// `bytes` global -> shared, completing on `barrier`. Addresses and size are multiples of 16.
DSA_DEVICE void copy_bulk(u32 shared_dst, const void* global_src, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_dst),
               "l"(global_src), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace ptx
