// Index keys into cache slots: 16 dims a lane, dim / 16 lanes a key, so 4 to 16 keys a warp.
//
//   keys (global) -> 16 fp32 a lane -> amax over the lanes of a scale -> scale by the rule -> codes -> 16 B (8 B) a lane
//                                                                          -> the key's first lane stores its scale word
//
// Nothing but codes and scale words of named slots is written, and a key whose slot the pool does not have is not read
// either.
#pragma once
#include "index_cache/codes.cuh"
#include "prims/kv/codes.cuh"
#include "prims/kv/place.cuh"
#include "prims/kv/write_rule.cuh"
#include "prims/ptx/arithmetic.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"

namespace index_cache {

template <class C, class Codes, class Rows, class Params>
struct WriteKeys {
  static constexpr int kThreads = C::kThreads, kPieceDims = kv::kPieceDims;
  static constexpr int kLanes = C::kDim / kPieceDims, kKeys = kThreads / kLanes;
  static constexpr int kScaleLanes = C::kScaleDims / kPieceDims;
  static_assert(32 % kLanes == 0 && kLanes % kScaleLanes == 0);

  static DSA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index(), piece = thread % kLanes;
    const i64 row = static_cast<i64>(ptx::block_index()) * kKeys + thread / kLanes;
    const kv_cache::Pages pages{p.page_multiplier, p.page_shift, p.page_size, p.pool_tokens};
    const i64 slot = row < p.rows_count ? kv_cache::slot_of(p.slots, p.slots_wide, row) : -1;
    // Lanes without a slot go on, since all of a warp meet in the shuffles.
    const bool live = pages.holds(slot);
    float x[kPieceDims] = {};
    constexpr int kBytes = Rows::kBits / 8;
    if (live) Rows::load(static_cast<const u8*>(p.keys) + (row * p.key_stride + piece * kPieceDims) * kBytes, x);
    const kv_cache::Rule<C> rule = kv_cache::Rule<C>::of(largest(x));
    const u32 word = scale_word(rule.scale, piece);
    if (!live) return;
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) x[i] = rule.units(x[i]);
    u32 words[Codes::kWords];
    Codes::pack(words, x);
    const kv_cache::Token token(pages, slot);
    constexpr int kCodeBytes = 4 * Codes::kWords * kLanes;
    store(token.at(p.cache, p.page_stride_bytes, {0, kCodeBytes, 0}) + 4 * Codes::kWords * piece, words, p.wide_pages != 0);
    if (piece == 0) ptx::store_global_4(token.at(p.cache, p.page_stride_bytes, {kCodeBytes, 4, 0}), word);
  }

 private:
  // Bits of the largest magnitude among the dims of a scale.
  static DSA_DEVICE u32 largest(const float (&x)[kPieceDims]) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) amax = larger(amax, ptx::bits_of(x[i]) & kv::kMagnitude);
#pragma unroll
    for (int mask = 1; mask < kScaleLanes; mask *= 2) amax = larger(amax, ptx::shuffle_xor(amax, mask));
    return amax;
  }

  // The four bytes behind a page's codes that belong to a key: one fp32, or a ue8m0 for each scale and filler.
  static DSA_DEVICE u32 scale_word(float scale, int piece) {
    u32 word = ptx::bits_of(scale);
    if constexpr (C::kBlockScaled != 0) {
      word = (word >> 23 & 0xff) << (piece / kScaleLanes * 8);
#pragma unroll
      for (int mask = kScaleLanes; mask < kLanes; mask *= 2) word |= ptx::shuffle_xor(word, mask);
      word |= C::kWordFiller;
    }
    return word;
  }

  static DSA_DEVICE void store(u8* to, const u32 (&words)[Codes::kWords], bool wide) {
    if (wide) {
      if constexpr (Codes::kWords == 4) ptx::store_global_16(to, Words4{words[0], words[1], words[2], words[3]});
      else ptx::store_global_8(to, static_cast<u64>(words[1]) << 32 | words[0]);
      return;
    }
#pragma unroll
    for (int i = 0; i < Codes::kWords; ++i) ptx::store_global_4(to + 4 * i, words[i]);
  }

  static DSA_DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
};

}  // namespace index_cache
