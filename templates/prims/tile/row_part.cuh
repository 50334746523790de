// Second parts of rows: what a row has elsewhere, in shared memory kPartOffsetBytes behind its begin. Scales that lie behind
// the rows of a page are short, rotary dims in a tensor of their own are long.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/ptx/shared.cuh"
#include "prims/types.cuh"

namespace tile {

template <class C>
struct RowPart {
  static constexpr bool kIsLong = C::kPartBytes >= 64;  // copied as rows are
  static constexpr bool kIsShort = C::kPartBytes > 0 && !kIsLong;
  static constexpr int kStep = C::kPartBytes % 16 == 0 ? 16 : 8;
  static_assert(C::kPartBytes % kStep == 0 && C::kPartOffsetBytes % kStep == 0);
  static_assert(!kIsLong || C::kPartBytes % 16 == 0);

  // Each lane starts the copies of its own row's part; zeros for rows outside of `mask` that are in `wanted`.
  static DSA_DEVICE void copy(u32 rows, u64 address, u32 mask, u32 wanted, int lane) {
    if ((wanted >> lane & 1) == 0) return;
    const u32 target = rows + lane * C::kRowPitchBytes + C::kPartOffsetBytes, bytes = (mask >> lane & 1) * kStep;
#pragma unroll
    for (int at = 0; at < C::kPartBytes; at += kStep) {
      const u8* source = reinterpret_cast<const u8*>(address) + at;
      if constexpr (kStep == 16) {
        ptx::copy_async_16(target + at, source, bytes);
      } else {
        ptx::copy_async_8(target + at, source, bytes);
      }
    }
  }
};

}  // namespace tile
