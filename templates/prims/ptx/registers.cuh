// Moving registers between warpgroups. sm_90a+; the kernel needs __launch_bounds__(threads, 1), and all warps of a
// warpgroup execute the instruction.
#pragma once
#include "prims/types.cuh"

namespace ptx {

template <int kRegisters>
DSA_DEVICE void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
DSA_DEVICE void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ptx
