// Shared-memory barriers with phases.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void mbarrier_init(u32 barrier, u32 count, int line = __builtin_LINE()) { host::mbarrier_init(barrier, count, line); }

DSA_DEVICE void mbarrier_arrive(u32 barrier, int line = __builtin_LINE()) { host::mbarrier_arrive(barrier, line); }

DSA_DEVICE void mbarrier_wait(u32 barrier, u32 parity, int line = __builtin_LINE()) { host::mbarrier_wait(barrier, parity, line); }

DSA_DEVICE void mbarrier_arrive_after_copies(u32 barrier, int line = __builtin_LINE()) {
  host::mbarrier_arrive_after_copies(barrier, line);
}

}  // namespace ptx
