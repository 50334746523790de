// 16-bit operands of warpgroup products in shared memory: rows (columns of the product) of any length in pieces of 64
// elements; a piece is kRows x 128 B at a multiple of 1024, swizzled.
#pragma once
#include "prims/ptx/wgmma.cuh"
#include "prims/types.cuh"

namespace tile {

template <int kRows>
struct OperandImage {
  static constexpr int kRowBytes = 128;  // what the swizzle spans
  static constexpr int kPieceBytes = kRows * kRowBytes;
  static_assert(kRows % 8 == 0);

  // The unit-th 16 bytes of a row whose first piece begins at `row`: base + 128 row index.
  static DSA_DEVICE u32 unit(u32 row, int unit) {
    return row + unit / 8 * kPieceBytes + ((unit % 8 ^ static_cast<int>(row >> 7 & 7)) << 4);
  }

  // The 16 elements of all rows that are the step-th in k; `first`: swizzled_operand(base).
  static DSA_DEVICE u64 step(u64 first, int step) { return first + (step / 4 * (kPieceBytes / 16) + step % 4 * 2); }
};

}  // namespace tile
