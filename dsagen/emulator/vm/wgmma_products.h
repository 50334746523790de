// Products of a warpgroup: K dims of 16, 32 or 8 elements in 32 bytes, and of whole numbers of 8 bits.
#pragma once
#include "wgmma.h"

namespace vm {

// `warps` are the four of the warpgroup.
template <int K>
void multiply(Warp* warps, const WgmmaForm& form, const WgmmaOperands& operands);
void multiply_bytes(Warp* warps, const WgmmaForm& form, const WgmmaOperands& operands);

}  // namespace vm
