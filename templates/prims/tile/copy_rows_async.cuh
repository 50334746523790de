// Copies one stage of scattered KV rows by a warp, 16 bytes a lane and copy (any arch).
#pragma once
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/row_part.cuh"
#include "prims/tile/rows.cuh"

namespace tile {

template <class C>
struct RowCopy {
  static constexpr int kArrivals = 33;  // each lane's copies, and lane 0 for what the warp stored
  // Eight lanes share a row: a copy instruction takes 128 B of each of four rows, at addresses that differ between
  // instructions by constants. (A row per instruction would need two shuffles and a 64-bit add each; four lanes a row
  // would fetch half as many sectors again, since rows start at any multiple of 16 B.)
  static constexpr int kLanesPerRow = 8;
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  static_assert(C::kRowBytes % 16 == 0 && C::kStageTokens == 32);

  static DSA_DEVICE void fence_init() {}

  // Starts filling the stage at `rows`: lane l passes the address of row l, and of its second part where there is one. Rows
  // that are not in `mask` are zeros where `wanted` has them, and nothing is read for them. Completes on `landed`.
  static DSA_DEVICE void start(u32 rows, u64 address, u64 part, u32 mask, u32 wanted, u32 landed, u32, int lane) {
    copy<C::kRowBytes>(rows, address, mask, wanted, lane);
    if constexpr (RowPart<C>::kIsLong) {
      copy<C::kPartBytes>(rows + C::kPartOffsetBytes, part, mask, wanted, lane);
    } else if constexpr (RowPart<C>::kIsShort) {
      RowPart<C>::copy(rows, part, mask, wanted, lane);
    }
    ptx::mbarrier_arrive_after_copies(landed);
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(landed);
  }

 private:
  template <int kBytes>
  static DSA_DEVICE void copy(u32 rows, u64 address, u32 mask, u32 wanted, int lane) {
    constexpr int kRowChunks = kBytes / 16;
    const u32 low = static_cast<u32>(address), high = static_cast<u32>(address >> 32);
    const int in_row = lane % kLanesPerRow;
#pragma unroll 2
    for (int first = 0; first < C::kStageTokens; first += kRowsAtOnce) {
      const int row = first + lane / kLanesPerRow;
      const u64 source = (static_cast<u64>(ptx::shuffle(high, row)) << 32 | ptx::shuffle(low, row)) + in_row * 16;
      const u32 target = rows + row * C::kRowPitchBytes + in_row * 16;
      const u32 bytes = (mask >> row & 1) * 16;
      if (wanted >> row & 1) {
#pragma unroll
        for (int chunk = 0; chunk < kRowChunks; chunk += kLanesPerRow)
          if (chunk + kLanesPerRow <= kRowChunks || in_row < kRowChunks - chunk)
            ptx::copy_async_16(target + chunk * 16, reinterpret_cast<const u8*>(source) + chunk * 16, bytes);
      }
    }
  }
};

}  // namespace tile
