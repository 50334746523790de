// Hints to caches. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// The line of an address of global memory into L2, without waiting for it.
DSA_DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

}  // namespace ptx
