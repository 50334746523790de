// Where a cache row lies: id -> page and slot -> address. Shared by the gathers.
#pragma once
#include "prims/types.cuh"

namespace tile {

// floor(n / page_size) for 0 <= n < 2^31 by a multiplication: multiplier = ceil(2^(31 + shift) / page_size),
// shift = ceil(log2(page_size)).
struct PageDivisor {
  u64 multiplier;
  u32 shift;
  u32 page_size;
  DSA_DEVICE u32 divide(u32 n) const { return static_cast<u32>((n * multiplier) >> (31 + shift)); }
};

struct RowPool {
  const u8* base;
  i64 page_stride_bytes;
  i64 row_stride_bytes;
  u32 tokens;
  PageDivisor page;

  DSA_DEVICE bool holds(i32 id) const { return id >= 0 && static_cast<u32>(id) < tokens; }

  DSA_DEVICE u64 address(i32 id) const {
    const u32 index = page.divide(static_cast<u32>(id));
    const u32 slot = static_cast<u32>(id) - index * page.page_size;
    return reinterpret_cast<u64>(base + static_cast<i64>(index) * page_stride_bytes + static_cast<i64>(slot) * row_stride_bytes);
  }
};

}  // namespace tile
