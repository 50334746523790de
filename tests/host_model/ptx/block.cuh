// Where all threads of a block meet.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void block_sync(int line = __builtin_LINE()) { host::barrier(0, host::block_threads(), false, false, line); }

}  // namespace ptx
