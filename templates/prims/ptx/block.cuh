// Where all threads of a block meet. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// All threads of the block come here, each warp as a whole; orders their accesses of shared memory.
DSA_DEVICE void block_sync() { asm volatile("barrier.sync.aligned 0;" ::: "memory"); }

}  // namespace ptx
