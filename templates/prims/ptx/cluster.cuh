// CTAs of a thread-block cluster: how many there are, when they meet, and each other's shared memory. sm_90+.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/types.cuh"

namespace ptx {

// CTAs of this cluster; 1 in a launch without clusters.
DSA_DEVICE u32 cluster_blocks() {
  u32 out;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(out));
  return out;
}

// All threads of the cluster that have not exited arrive, then wait. What one did before it arrived is known to all that
// have waited, and accesses of other CTAs' shared memory before are done. Every lane of the warp calls.
DSA_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DSA_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Address of the same place in the shared memory of the cluster's CTA `rank`.
DSA_DEVICE u32 cluster_address(u32 shared_address, int rank) {
  u32 out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(shared_address), "r"(rank));
  return out;
}

DSA_DEVICE u32 load_cluster_4(u32 cluster_address) {
  u32 x;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(x) : "r"(cluster_address) : "memory");
  return x;
}

// Zeros, and no access, where `wanted` is false.
DSA_DEVICE Words4 load_cluster_16_if(bool wanted, u32 cluster_address) {
  Words4 w;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @p ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(w.x), "=&r"(w.y), "=&r"(w.z), "=&r"(w.w)
      : "r"(cluster_address), "r"(static_cast<u32>(wanted))
      : "memory");
  return w;
}

}  // namespace ptx
