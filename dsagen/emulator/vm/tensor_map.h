// Boxes of tensors, piece by piece.
#pragma once
#include <algorithm>

#include "machine.h"

namespace vm {

// The box at these coordinates (signed, fastest dimension first) of the tensor map at a generic address, to be loaded or
// stored.
Box read_box(Warp& w, int lane, u64 address, const i32* at, u32 rank, bool stores);
// The element's size in a reduction and what it is there, as flags of vm/atomics.cpp.
u32 reduction_flags(const Box& box, u32 operation);

// Where an address of shared memory is moved to, with 32, 64 or 128 bytes in a row.
inline u32 swizzled(u32 address, u32 row_bytes) {
  return row_bytes == 0 ? address : address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4);
}

// Calls f(shared address, global address or 0 outside of the tensor, bytes) for a box that lies at `shared`: no piece
// leaves a row, nor 16 bytes where they are swizzled.
template <class F>
void each_piece(const Box& box, u32 shared, F f) {
  u32 index[5] = {};
  u32 linear = 0;
  const u32 row_bytes = box.counts[0] * box.element_bytes;
  const u32 longest = box.swizzle == 0 ? row_bytes : 16;
  // Bytes of a row that lie in the tensor.
  const i64 first = box.at[0], per_unit = box.in_units ? 16 / box.element_bytes : 1;
  const i64 size = (static_cast<i64>(box.sizes[0]) + per_unit - 1) / per_unit * per_unit;
  const u32 low = static_cast<u32>(std::clamp<i64>(-first, 0, box.counts[0])) * box.element_bytes;
  const u32 high = static_cast<u32>(std::clamp<i64>(size - first, 0, box.counts[0])) * box.element_bytes;
  for (;;) {
    bool inside = low < high;
    u64 row = box.address + static_cast<u64>(first * static_cast<i64>(box.element_bytes));
    for (u32 n = 1; n < box.rank; n++) {
      const i64 c = box.at[n] + static_cast<i64>(index[n]) * box.steps[n];
      inside &= c >= 0 && c < static_cast<i64>(box.sizes[n]);
      row += static_cast<u64>(c) * box.strides[n];
    }
    for (u32 from = 0; from < row_bytes;) {
      u32 to = std::min(row_bytes, (from / longest + 1) * longest);
      const bool within = inside && from >= low && from < high;
      if (within) to = std::min(to, high);
      if (inside && from < low) to = std::min(to, low);
      f(swizzled(shared + linear + from, box.swizzle), within ? row + from : 0, to - from);
      from = to;
    }
    linear += row_bytes;
    u32 n = 1;
    for (; n < box.rank; n++) {
      if (++index[n] < box.counts[n]) break;
      index[n] = 0;
    }
    if (n >= box.rank) return;
  }
}

}  // namespace vm
