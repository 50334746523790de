// Plain 16-bit keys and values that come from two tensors: in shared memory the values of a row lie behind its keys.
#pragma once
#include "prims/kv/plain.cuh"

namespace kv {

template <class Plain>
struct ValuesApart : Plain {
  template <int kDims, int kHeadTiles>
  struct Values : Plain::template Values<kDims, kHeadTiles> {
    DSA_DEVICE Values(u32 rows, int dim, int lane)
        : Plain::template Values<kDims, kHeadTiles>(rows + Plain::Row::kPartOffsetBytes, dim, lane) {}
  };
};

}  // namespace kv
