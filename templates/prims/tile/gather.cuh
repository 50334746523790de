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
  // Eight lanes share a row: a copy instruction takes 128 B of each of four rows, at addresses that differ between
  // instructions by constants. (A row per instruction would need two shuffles and a 64-bit add each; four lanes a row
  // would fetch half as many sectors again, since rows start at any multiple of 16 B.)
  static constexpr int kLanesPerRow = 8;
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  static constexpr int kSets = kRows / kRowsAtOnce;
  static constexpr int kRowChunks = C::kRowBytes / 16;
  static_assert(kRows % kRowsAtOnce == 0 && kRows <= 32 && C::kRowBytes % 16 == 0);

  const u8* pool;
  i64 page_stride_bytes;
  i64 row_stride_bytes;
  u32 pool_tokens;
  PageDivisor page;

  DSA_DEVICE bool holds(i32 id) const { return id >= 0 && static_cast<u32>(id) < pool_tokens; }

  DSA_DEVICE const u8* row_address(i32 id) const {
    const u32 index = page.divide(static_cast<u32>(id));
    const u32 slot = static_cast<u32>(id) - index * page.page_size;
    return pool + static_cast<i64>(index) * page_stride_bytes + static_cast<i64>(slot) * row_stride_bytes;
  }

  // Starts copying this warp's rows to `rows` (shared address of its first row); lanes 0 .. kRows-1 pass the ids.
  // Rows without a valid id are zero-filled and nothing is read for them. Returns the mask of valid rows.
  DSA_DEVICE u32 start(u32 rows, i32 id, int lane) const {
    const bool valid = lane < kRows && holds(id);
    const u32 mask = ptx::ballot(valid);
    const u64 address = reinterpret_cast<u64>(valid ? row_address(id) : pool);
    const u32 low = static_cast<u32>(address), high = static_cast<u32>(address >> 32);
    const int in_row = lane % kLanesPerRow;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int row = set * kRowsAtOnce + lane / kLanesPerRow;
      const u64 source = (static_cast<u64>(ptx::shuffle(high, row)) << 32 | ptx::shuffle(low, row)) + in_row * 16;
      const u32 target = rows + row * C::kRowPitchBytes + in_row * 16;
      const u32 bytes = (mask >> row & 1) * 16;
#pragma unroll
      for (int chunk = 0; chunk < kRowChunks; chunk += kLanesPerRow)
        if (chunk + kLanesPerRow <= kRowChunks || in_row < kRowChunks - chunk)
          ptx::copy_async_16(target + chunk * 16, reinterpret_cast<const u8*>(source) + chunk * 16, bytes);
    }
    return mask;
  }
};

}  // namespace tile
