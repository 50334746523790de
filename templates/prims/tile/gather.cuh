// Gathers scattered KV rows into a shared-memory stage with 16-byte asynchronous copies. Each warp owns
// kTileTokens / kWarps consecutive rows of every tile and knows their ids one tile ahead.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"

namespace tile {

// floor(n / page_size) for 0 <= n < 2^31 by a multiplication: multiplier = ceil(2^(31 + shift) / page_size),
// shift = ceil(log2(page_size)).
struct PageDivisor {
  u64 multiplier;
  u32 shift;
  u32 page_size;
  DSA_DEVICE u32 divide(u32 n) const { return static_cast<u32>((n * multiplier) >> (31 + shift)); }
};

template <class C>
struct RowGather {
  static constexpr int kRows = C::kTileTokens / C::kWarps;  // per warp and tile
  static constexpr int kRowChunks = C::kRowBytes / 16;
  static constexpr int kWarpwide = kRowChunks / 32 * 32;  // chunks of a row copied by whole-warp instructions
  static constexpr int kTail = kRowChunks - kWarpwide;    // the rest, packed over rows
  static_assert(C::kTileTokens % C::kWarps == 0 && kRows <= 32 && C::kRowBytes % 16 == 0);

  const u8* pool;
  i64 page_stride_bytes;
  i64 row_stride_bytes;
  u32 pool_tokens;
  PageDivisor page;

  DSA_DEVICE bool holds(i32 id) const { return id >= 0 && static_cast<u32>(id) < pool_tokens; }

  DSA_DEVICE i64 row_offset(i32 id) const {
    const u32 index = page.divide(static_cast<u32>(id));
    const u32 slot = static_cast<u32>(id) - index * page.page_size;
    return static_cast<i64>(index) * page_stride_bytes + static_cast<i64>(slot) * row_stride_bytes;
  }

  // Starts copying this warp's rows to `rows` (shared address of its first row); lanes 0 .. kRows-1 pass the ids.
  // Rows without a valid id are zero-filled and nothing is read for them. Returns the mask of valid rows.
  DSA_DEVICE u32 start(u32 rows, i32 id, int lane) const {
    const bool valid = lane < kRows && holds(id);
    const u32 mask = ptx::ballot(valid);
    const i64 offset = valid ? row_offset(id) : 0;
    const u32 offset_low = static_cast<u32>(offset), offset_high = static_cast<u32>(offset >> 32);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const u8* source = at(offset_low, offset_high, row) + lane * 16;
      const u32 target = rows + row * C::kRowPitchBytes + lane * 16;
      const u32 bytes = (mask >> row & 1) * 16;
#pragma unroll
      for (int chunk = 0; chunk < kWarpwide; chunk += 32) ptx::copy_async_16(target + chunk * 16, source + chunk * 16, bytes);
    }
#pragma unroll
    for (int first = 0; first < kRows * kTail; first += 32) {
      const int item = first + lane;
      const int row = item < kRows * kTail ? item / kTail : 0, chunk = kWarpwide + item % kTail;
      const u8* source = at(offset_low, offset_high, row) + chunk * 16;
      const u32 bytes = (mask >> row & 1) * 16;
      if (item < kRows * kTail) ptx::copy_async_16(rows + row * C::kRowPitchBytes + chunk * 16, source, bytes);
    }
    return mask;
  }

 private:
  DSA_DEVICE const u8* at(u32 offset_low, u32 offset_high, int row) const {
    const u32 low = ptx::shuffle(offset_low, row), high = ptx::shuffle(offset_high, row);
    return pool + static_cast<i64>(static_cast<u64>(high) << 32 | low);
  }
};

}  // namespace tile
