// Tokens from one layout of a format to the other, a warp a token: the same bytes at other places, 16 at a time.
#pragma once
#include "prims/kv/place.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/thread.cuh"

namespace kv_cache {

template <class C, class Params>
struct ConvertRows {
  static constexpr int kThreads = C::kThreads, kWarps = kThreads / 32;
  static_assert(C::kDataBytes % 16 == 0 && C::kScaleBytes % 16 == 0);

  static DSA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const i64 row = static_cast<i64>(ptx::block_index()) * kWarps + thread / 32;
    if (row >= p.rows_count) return;
    const Pages source_pages{p.source_multiplier, p.source_shift, p.source_page_size, p.source_tokens};
    const Pages target_pages{p.target_multiplier, p.target_shift, p.target_page_size, p.target_tokens};
    const i64 from = p.source_slots == nullptr ? row : slot_of(p.source_slots, p.source_wide, row);
    const i64 to = p.target_slots == nullptr ? row : slot_of(p.target_slots, p.target_wide, row);
    if (!source_pages.holds(from) || !target_pages.holds(to)) return;
    const Token source(source_pages, from), target(target_pages, to);
    move<C::kDataBytes>(source.at(p.source, p.source_stride_bytes, {0, C::kSourceStride, 0}),
                        target.at(p.target, p.target_stride_bytes, {0, C::kTargetStride, 0}), lane);
    move<C::kScaleBytes>(
        source.at(p.source, p.source_stride_bytes, {C::kSourceSection, C::kSourceScaleStride, C::kSourceScaleOffset}),
        target.at(p.target, p.target_stride_bytes, {C::kTargetSection, C::kTargetScaleStride, C::kTargetScaleOffset}), lane);
  }

 private:
  template <int kBytes>
  static DSA_DEVICE void move(const u8* from, u8* to, int lane) {
#pragma unroll
    for (int first = 0; first < kBytes; first += 16 * 32) {
      const int at = first + 16 * lane;
      if (at < kBytes) ptx::store_global_16(to + at, ptx::load_global_16(from + at));
    }
  }
};

}  // namespace kv_cache
