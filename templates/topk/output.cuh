// Where the selected indices of a row go, and what they become on the way.
#pragma once
#include "prims/ptx/prefetch.cuh"
#include "prims/tile/rows.cuh"
#include "prims/types.cuh"

namespace topk {

template <class Params>
struct RowOutput {
  const Params& p;
  i32* out;
  i32* raw;                // or null
  const i32* table;        // the row's page table, or null
  i64 table_start, offset;
  bool ordered;            // slots follow the indices
  bool unmapped;           // there are page tables, and the row has none

  DSA_DEVICE RowOutput(const Params& params, u32 row) : p(params) {
    out = p.out + static_cast<i64>(row) * p.out_stride;
    raw = p.raw == nullptr ? nullptr : p.raw + static_cast<i64>(row) * p.raw_stride;
    ordered = p.ordered != 0;
    offset = p.offsets == nullptr ? 0 : p.offsets[row];
    const i64 table_row = p.table_of_row == nullptr ? static_cast<i64>(row) : p.table_of_row[row];
    unmapped = p.page_table != nullptr && (table_row < 0 || table_row >= p.table_rows);
    table = p.page_table == nullptr || unmapped ? nullptr : p.page_table + table_row * p.table_stride;
    table_start = p.table_starts == nullptr ? 0 : p.table_starts[row];
  }

  // Lets the entries for a window of `length` elements come nearer, a cache line by each thread at most.
  DSA_DEVICE void prefetch_table(u32 length, u32 thread, u32 threads) const {
    constexpr u32 kLineEntries = 32;
    if (table == nullptr || length == 0) return;
    const u32 last = tile::PageDivisor{p.page_multiplier, p.page_shift, p.page_size}.divide(length - 1), number = kLineEntries * thread;
    const i64 column = table_start + number;
    if (last < kLineEntries * threads && number <= last && column >= 0 && column < p.table_columns) ptx::prefetch_l2(table + column);
  }

  // Element `index` of the window takes a slot.
  DSA_DEVICE void put(u32 slot, u32 index) const { store(slot, index, translate(index)); }
  DSA_DEVICE void store(u32 slot, u32 index, i32 id) const {
    out[slot] = id;
    if (raw != nullptr) raw[slot] = static_cast<i32>(index);
  }

  // Slots from `count` on stay without an element. All threads come here.
  DSA_DEVICE void finish(u32 row, u32 count, u32 thread, u32 threads) const {
    for (u32 slot = count + thread; slot < static_cast<u32>(p.k); slot += threads) {
      out[slot] = -1;
      if (raw != nullptr) raw[slot] = -1;
    }
    if (thread == 0 && p.counts != nullptr) p.counts[row] = static_cast<i32>(count);
  }

  // The id that an index becomes; -1 where the tables have none for it.
  DSA_DEVICE i32 translate(u32 index) const {
    i64 id = index;
    if (unmapped) return -1;
    if (table != nullptr) {
      const tile::PageDivisor page{p.page_multiplier, p.page_shift, p.page_size};
      const u32 number = page.divide(index);
      const i64 column = table_start + number;
      if (column < 0 || column >= p.table_columns) return -1;
      const i64 entry = table[column];
      if (entry < 0) return -1;
      id = entry * p.page_size + (index - number * p.page_size);
    }
    id += offset;
    return id >= 0 && id <= 0x7fffffff ? static_cast<i32>(id) : -1;
  }
};

}  // namespace topk
