// How large the grid is.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 grid_blocks() { return host::grid_blocks(); }

}  // namespace ptx
