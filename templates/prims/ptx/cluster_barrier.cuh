// What CTAs of a cluster tell each other without waiting for all that they have written. sm_90+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// As cluster_arrive, but it tells only that the thread runs. What is on its way is not waited for, which an arrival that
// releases does.
DSA_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// Arrives once at a barrier of another CTA. What the caller has read and written before happens before who waits for the
// phase goes on.
DSA_DEVICE void mbarrier_arrive_of_block(u32 cluster_address) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
}

// Returns once the phase of this parity has completed, by arrivals of other CTAs.
DSA_DEVICE void mbarrier_wait_for_block(u32 barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred p;\nRETRY:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n @!p bra RETRY;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace ptx
