// Moving registers between warpgroups: the block's pool is counted, and who asks for more waits until it has them.
#pragma once
#include "prims/types.cuh"

namespace ptx {

template <int kRegisters>
DSA_DEVICE void registers_raise(int line = __builtin_LINE()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  host::move_registers(kRegisters, true, line);
}

template <int kRegisters>
DSA_DEVICE void registers_lower(int line = __builtin_LINE()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  host::move_registers(kRegisters, false, line);
}

}  // namespace ptx
