// Hints to caches, which change nothing.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void prefetch_l2(const void*) {}

}  // namespace ptx
