// Cache slots into bf16 rows, a warp a row: each lane takes 16 dims, their codes times their scale in fp32, rounded once to
// bf16. Which slot a row means comes from a list, or from a block table and where each request's rows begin. A row without a
// slot in the pool is zeros, and nothing is read for it.
#pragma once
#include "prims/kv/place.cuh"
#include "prims/kv/codes.cuh"
#include "prims/kv/scales.cuh"
#include "prims/ptx/arithmetic.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/thread.cuh"

namespace kv_cache {

template <class C, class Codes, class Scale, class Params>
struct ReadRows {
  static constexpr int kThreads = C::kThreads, kWarps = kThreads / 32;
  static constexpr int kPieceDims = kv::kPieceDims, kPieces = C::kValueDims / kPieceDims;
  static constexpr i64 kNone = -1;

  static DSA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const i64 row = static_cast<i64>(ptx::block_index()) * kWarps + thread / 32;
    if (row >= p.rows_count) return;
    u8* out = static_cast<u8*>(p.out) + row * p.out_stride * 2;
    const Pages pages{p.page_multiplier, p.page_shift, p.page_size, p.pool_tokens};
    const i64 slot = p.slots != nullptr ? slot_of(p.slots, p.slots_wide, row) : table_slot(p, static_cast<i32>(row));
    if (!pages.holds(slot)) return zero(out, lane);
    const Token token(pages, slot);
    const u8* values = token.at(p.cache, p.page_stride_bytes, {0, C::kValuesStride, 0});
    const u8* scales = token.at(p.cache, p.page_stride_bytes, {C::kScalesSection, C::kScalesStride, C::kScalesOffset});
#pragma unroll
    for (int first = 0; first < kPieces; first += 32) {
      const int piece = first + lane;
      if (first + 32 <= kPieces || piece < kPieces) read_piece(piece, values, scales, out);
    }
    if constexpr (C::kRopeDims > 0) {
      static_assert(C::kRopeDims == 64, "two a lane");
      constexpr Segment kSegment{0, C::kRopeStride, C::kRopeOffset};
      const u8* rope = C::kRopeApart ? token.at(p.rope_cache, p.rope_page_stride_bytes, kSegment)
                                     : token.at(p.cache, p.page_stride_bytes, kSegment);
      ptx::store_global_4(out + 2 * C::kValueDims + 4 * lane, ptx::load_global_4(rope + 4 * lane));
    }
  }

 private:
  static DSA_DEVICE void read_piece(int piece, const u8* values, const u8* scales, u8* out) {
    const u8* from = values + piece * (kPieceDims * Codes::kBits / 8);
    u8* to = out + piece * (kPieceDims * 2);
    if constexpr (kv::IsSame<Codes, kv::Bf16Codes>::kValue) {
      kv::Halves::load(from).store(to);
    } else {
      float x[kPieceDims];
      Codes::load(from, x);
      if constexpr (C::kGroupDims > 0) {
        const float scale = Scale::load(scales + piece * kPieceDims / C::kGroupDims * Scale::kBytes);
#pragma unroll
        for (int i = 0; i < kPieceDims; ++i) x[i] = ptx::mul_rn(x[i], scale);
      }
      kv::Bf16Codes::store(to, x);
    }
  }

  static DSA_DEVICE void zero(u8* out, int lane) {
    for (int at = 16 * lane; at < 2 * (C::kValueDims + C::kRopeDims); at += 16 * 32) ptx::store_global_16(out + at, Words4{0, 0, 0, 0});
  }

  // The slot of a row by its request's block table; kNone where there is none.
  static DSA_DEVICE i64 table_slot(const Params& p, i32 row) {
    if (p.requests == 0 || row < p.row_starts[0] || row >= p.row_starts[p.requests]) return kNone;
    // The last request whose rows begin at or before this one: empty requests begin where the next one does.
    i32 request = 0;
    for (i32 end = p.requests; end - request > 1;) {
      const i32 middle = request + (end - request) / 2;
      (p.row_starts[middle] <= row ? request : end) = middle;
    }
    const i64 start = p.token_starts == nullptr ? 0 : p.token_starts[request];
    const i64 position = start + (static_cast<i64>(row) - p.row_starts[request]);
    if (position < 0 || position > 0x7fffffff) return kNone;
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
    const u32 column = divisor.divide(static_cast<u32>(position));
    if (column >= static_cast<u32>(p.table_columns)) return kNone;
    const i64 page = p.block_table[request * p.table_stride + column];
    return page < 0 ? kNone : page * p.page_size + (static_cast<u32>(position) - column * p.page_size);
  }
};

}  // namespace kv_cache
