// The smaller and the larger of two.
#pragma once
#include "prims/types.cuh"

namespace topk {

template <class T>
DSA_DEVICE T least(T a, T b) {
  return a < b ? a : b;
}

template <class T>
DSA_DEVICE T most(T a, T b) {
  return a > b ? a : b;
}

}  // namespace topk
