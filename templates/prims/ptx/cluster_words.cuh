// Words in the shared memory of other CTAs of the cluster, and which cluster and CTA this is. sm_90+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// This CTA's cluster in x, and its rank in it.
DSA_DEVICE u32 cluster_index() {
  u32 out;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(out));
  return out;
}
DSA_DEVICE u32 cluster_rank() {
  u32 out;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(out));
  return out;
}

DSA_DEVICE void store_cluster_4(u32 cluster_address, u32 x) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(cluster_address), "r"(x) : "memory");
}

// Zero, and no access, where `wanted` is false.
DSA_DEVICE u32 load_cluster_4_if(bool wanted, u32 cluster_address) {
  u32 x;
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.b32 %0, 0;\n @p ld.shared::cluster.b32 %0, [%1];\n}"
               : "=&r"(x)
               : "r"(cluster_address), "r"(static_cast<u32>(wanted))
               : "memory");
  return x;
}

// The word at `shared_address` in CTA `rank`; zero, and no access, where `wanted` is false.
DSA_DEVICE u32 load_of_block_4_if(bool wanted, u32 shared_address, u32 rank) {
  u32 x;
  asm volatile(
      "{\n .reg .pred p;\n .reg .b32 a;\n setp.ne.u32 p, %3, 0;\n mov.b32 %0, 0;\n"
      " @p mapa.shared::cluster.u32 a, %1, %2;\n @p ld.shared::cluster.b32 %0, [a];\n}"
      : "=&r"(x)
      : "r"(shared_address), "r"(rank), "r"(static_cast<u32>(wanted))
      : "memory");
  return x;
}

}  // namespace ptx
