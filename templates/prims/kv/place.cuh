// From slots to bytes: which token a row means, and where a segment of that token lies. The namespace is that of the family
// which had it first: its evidence is keyed by the text.
#pragma once
#include "prims/tile/rows.cuh"
#include "prims/types.cuh"

namespace kv_cache {

// Distances of a segment within a page: token o has it at section x page_size + o x stride + offset.
struct Segment {
  i64 section, stride, offset;
};

// Pages of one pool, as a call's arguments give them.
struct Pages {
  u64 multiplier;
  u32 shift, size, tokens;

  DSA_DEVICE bool holds(i64 slot) const { return slot >= 0 && slot < static_cast<i64>(tokens); }
};

struct Token {
  u32 page, offset, page_size;

  // `slot` is one that the pool holds.
  DSA_DEVICE Token(const Pages& pages, i64 slot) : page_size(pages.size) {
    const tile::PageDivisor divisor{pages.multiplier, pages.shift, pages.size};
    page = divisor.divide(static_cast<u32>(slot));
    offset = static_cast<u32>(slot) - page * page_size;
  }

  template <class Byte>
  DSA_DEVICE Byte* at(Byte* base, i64 page_stride_bytes, const Segment& s) const {
    return base + page * page_stride_bytes + s.section * page_size + offset * s.stride + s.offset;
  }
};

// Element `row` of a list of int32 or int64 slots.
DSA_DEVICE i64 slot_of(const void* slots, i32 wide, i64 row) {
  return wide != 0 ? static_cast<const i64*>(slots)[row] : static_cast<i64>(static_cast<const i32*>(slots)[row]);
}

}  // namespace kv_cache
