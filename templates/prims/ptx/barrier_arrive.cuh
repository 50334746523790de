// Arriving at a barrier of the CTA without waiting. All: sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// The calling warps count towards the `threads` that barrier_sync waits for at `id`, and go on. What they wrote to shared
// memory before is seen by those that wait.
DSA_DEVICE void barrier_arrive(int id, int threads) { asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

}  // namespace ptx
