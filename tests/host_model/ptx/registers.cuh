// Moving registers between warpgroups: nothing moves here, but the warp must come as a whole.
#pragma once
#include "prims/types.cuh"

namespace ptx {

template <int kRegisters>
DSA_DEVICE void registers_raise(int line = __builtin_LINE()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  host::collective(host::Op::kRegisters, line);
}

template <int kRegisters>
DSA_DEVICE void registers_lower(int line = __builtin_LINE()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  host::collective(host::Op::kRegisters, line);
}

}  // namespace ptx
