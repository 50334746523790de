// A kernel's body behind the grid before it (sm_90+: programmatic dependent launch).
#pragma once
#include "prims/ptx/thread.cuh"

namespace tile {

// Blocks are placed while the last ones of the grid before still run. All that a body reads may come from there, and what it
// writes may still be read there, so that all threads wait before it begins.
template <class Body>
struct AfterGrid : Body {
  template <class Params, class Shared>
  static DSA_DEVICE void run(const Params& p, Shared& shared) {
    ptx::grid_dependency_wait();
    Body::run(p, shared);
  }
};

}  // namespace tile
