// Rows into cache slots, a warp a row: each lane takes 16 dims, lanes of a group agree on its largest magnitude.
//
//   rows (global) -> 16 fp32 a lane -> amax over the group's lanes -> scale by the rule -> codes -> 16 B (8 B) a lane
//                                                                        -> the group's first lane stores the scale
//
// Rotary dims with a segment of their own are copied, two a lane. Nothing but the segments of named slots is written, and
// a row whose slot the pool does not have is not read either.
#pragma once
#include "prims/kv/place.cuh"
#include "prims/kv/write_rule.cuh"
#include "prims/kv/codes.cuh"
#include "prims/kv/scales.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/thread.cuh"

namespace kv_cache {

template <class C, class Codes, class Scale, class Rows, class Params>
struct WriteRows {
  static constexpr int kThreads = C::kThreads, kWarps = kThreads / 32;
  static constexpr int kPieceDims = kv::kPieceDims, kPieces = C::kValueDims / kPieceDims;
  static constexpr int kGroupLanes = C::kGroupDims / kPieceDims;
  static constexpr int kRowElementBytes = Rows::kBits / 8;

  static DSA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const i64 row = static_cast<i64>(ptx::block_index()) * kWarps + thread / 32;
    if (row >= p.rows_count) return;
    const Pages pages{p.page_multiplier, p.page_shift, p.page_size, p.pool_tokens};
    const i64 slot = slot_of(p.slots, p.slots_wide, row);
    if (!pages.holds(slot)) return;
    const Token token(pages, slot);
    const Source source(p, row);
    u8* values = token.at(p.cache, p.page_stride_bytes, {0, C::kValuesStride, 0});
    u8* scales = token.at(p.cache, p.page_stride_bytes, {C::kScalesSection, C::kScalesStride, C::kScalesOffset});
#pragma unroll
    for (int first = 0; first < kPieces; first += 32) {
      const int piece = first + lane;
      const bool live = first + 32 <= kPieces || piece < kPieces;
      if constexpr (C::kGroupDims > 0) {
        write_scaled(source, piece, live, values, scales);
      } else if (live) {
        copy(source, piece, values);
      }
    }
    if constexpr (C::kScalePadBytes > 0) {
      if (lane < C::kScalePadBytes) ptx::store_global_1(scales + C::kValueDims / C::kGroupDims * Scale::kBytes + lane, 0);
    }
    if constexpr (C::kRopeDims > 0) write_rope(p, token, source, lane);
  }

 private:
  // A row, whose rotary dims may come in a tensor of their own.
  struct Source {
    const u8 *row, *rope;

    DSA_DEVICE Source(const Params& p, i64 index) {
      row = static_cast<const u8*>(p.rows) + index * p.row_stride * kRowElementBytes;
      const u8* apart = static_cast<const u8*>(p.k_pe) + index * p.k_pe_stride * kRowElementBytes;
      rope = p.k_pe == nullptr ? row + C::kJoinDim * kRowElementBytes : apart;
    }

    DSA_DEVICE const u8* dims(int dim) const {
      return dim < C::kJoinDim ? row + dim * kRowElementBytes : rope + (dim - C::kJoinDim) * kRowElementBytes;
    }
  };

  static DSA_DEVICE void write_scaled(const Source& source, int piece, bool live, u8* values, u8* scales) {
    float x[kPieceDims] = {};
    if (live) Rows::load(source.dims(piece * kPieceDims), x);
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) amax = larger(amax, ptx::bits_of(x[i]) & kv::kMagnitude);
#pragma unroll
    for (int mask = 1; mask < kGroupLanes; mask *= 2) amax = larger(amax, ptx::shuffle_xor(amax, mask));
    const Rule<C> rule = Rule<C>::of(amax);
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) x[i] = rule.units(x[i]);
    if (!live) return;
    Codes::store(values + piece * (kPieceDims * Codes::kBits / 8), x);
    if (piece % kGroupLanes == 0) Scale::store(scales + piece / kGroupLanes * Scale::kBytes, rule.scale);
  }

  static DSA_DEVICE void copy(const Source& source, int piece, u8* values) {
    const u8* from = source.dims(piece * kPieceDims);
    u8* to = values + piece * (kPieceDims * Codes::kBits / 8);
    if constexpr (kv::IsSame<Codes, Rows>::kValue) {
      kv::Halves::load(from).store(to);
    } else {
      float x[kPieceDims];
      Rows::load(from, x);
      Codes::store(to, x);
    }
  }

  static DSA_DEVICE void write_rope(const Params& p, const Token& token, const Source& source, int lane) {
    static_assert(C::kRopeDims == 64, "two a lane");
    constexpr Segment kSegment{0, C::kRopeStride, C::kRopeOffset};
    u8* to = (C::kRopeApart ? token.at(p.rope_cache, p.rope_page_stride_bytes, kSegment)
                            : token.at(p.cache, p.page_stride_bytes, kSegment)) +
             4 * lane;
    const u8* from = source.rope + 2 * lane * kRowElementBytes;
    u32 pair;
    if constexpr (kv::IsSame<Rows, kv::Fp32Codes>::kValue) {
      const u64 two = ptx::load_global_8(from);
      pair = ptx::pack_bf16(ptx::float_of(static_cast<u32>(two)), ptx::float_of(static_cast<u32>(two >> 32)));
    } else {
      pair = ptx::load_global_4(from);
      if constexpr (!kv::IsSame<Rows, kv::Bf16Codes>::kValue) pair = ptx::pack_bf16(Rows::number(pair & 0xffff), Rows::number(pair >> 16));
    }
    ptx::store_global_4(to, pair);
  }

  static DSA_DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
};

}  // namespace kv_cache
