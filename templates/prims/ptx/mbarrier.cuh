// Shared-memory barriers with phases. sm_80+ unless a function says otherwise.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// `count` arrivals complete a phase, together with the bytes that they announce.
DSA_DEVICE void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives once; what the caller wrote before is visible to whoever waits for the phase.
DSA_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// Returns once the phase of this parity has completed. A parity answers for the last completed phase only, so a waiter
// must see every phase.
DSA_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred p;\nRETRY:\n mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @!p bra RETRY;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n .reg .pred p;\nRETRY:\n mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n @!p bra RETRY;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// One arrival once all 16-byte copies that this thread has started before have landed. The barrier's count includes it.
DSA_DEVICE void mbarrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace ptx
