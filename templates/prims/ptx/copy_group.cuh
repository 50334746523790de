// Groups of a thread's 16-byte asynchronous copies. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// Closes the group of the copies that this thread started since the last one.
DSA_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns once all but the last `kPending` groups of this thread have landed; other threads see them after a barrier.
template <int kPending>
DSA_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx
