// The query image in shared memory, staged once per CTA; a second one where the second cache's rows are read in another order.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

// Address of the first head's row.
template <bool kExtra, class Shared>
DSA_DEVICE u32 query_image(Shared& shared) {
  if constexpr (kExtra) {
    return ptx::shared_address(shared.extra_query);
  } else {
    return ptx::shared_address(shared.query);
  }
}

template <class C, class Shared, class Encoding, class ExtraEncoding, class Params>
struct QueryImage {
  static constexpr int kChunks = (C::kNopeDims + C::kRopeDims) / 8;

  static constexpr int kLoads = (kChunks + 31) / 32;                             // of a lane and head row
  static constexpr int kRows = (C::kHeads + C::kScoreWarps + C::kValueWarps - 1) /  // head rows of a warp
                               (C::kScoreWarps + C::kValueWarps);

  // One warp per head row, all of a warp's loads before the first use: bf16 global -> query image. Where the encoding asks
  // for it each row is scaled by a power of two that brings its largest element to [2^14, 2^15), so that f16 keeps every
  // element exactly (those 2^-29 below the largest excepted); the inverse goes into the logit factor. Heads past the group's
  // end become zero rows.
  static DSA_DEVICE void stage(const Params& p, Shared& shared, const Work<C, Params>& work, int warp, int lane) {
    const int heads = work.heads(p);
    const u16* rows = p.q + work.batch(p) * p.q_stride_b + work.token(p) * p.q_stride_s + work.first_head * p.q_stride_h;
    Words4 q[kRows][kLoads];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int h = head(r, warp), chunk = i * 32 + lane;
        q[r][i] = ptx::load_global_16_if(h < heads && chunk < kChunks, rows + h * p.q_stride_h + 8 * chunk);
      }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (head(r, warp) < C::kHeads) stage_row(shared, head(r, warp), q[r], p.scale_log2, lane);
  }

 private:
  static DSA_DEVICE int head(int r, int warp) { return r * (C::kScoreWarps + C::kValueWarps) + warp; }

  static DSA_DEVICE void stage_row(Shared& shared, int h, const Words4 (&q)[kLoads], float scale_log2, int lane) {
    int exponent = 0;
    if (Encoding::kNormaliseQuery) {
      u32 largest = 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        largest = max_magnitude(max_magnitude(max_magnitude(max_magnitude(largest, q[i].x), q[i].y), q[i].z), q[i].w);
      exponent = row_exponent(largest);
    }
    const float down = ptx::float_of(static_cast<u32>(127 - exponent) << 23);
    const u32 image = ptx::shared_address(&shared.query[h][0]);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int chunk = i * 32 + lane;
      if (chunk < kChunks) Encoding::stage_query(image, chunk, q[i], down);
      if constexpr (!kSameType<Encoding, ExtraEncoding>) {
        if (chunk < kChunks) ExtraEncoding::stage_query(query_image<true>(shared) + h * C::kQueryPitchBytes, chunk, q[i], down);
      }
    }
    if (lane == 0) {
      shared.head_scale[h][0] = scale_log2 * ptx::float_of(static_cast<u32>(127 + exponent) << 23);
      shared.head_scale[h][1] = kNoReference;
    }
  }

  static DSA_DEVICE u32 max_magnitude(u32 largest, u32 pair) {
    const u32 low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu, both = low > high ? low : high;
    return largest > both ? largest : both;
  }

  // Exponent e with 2^14 <= largest / 2^e < 2^15; 0 where the row holds an infinity or NaN, which then passes unchanged.
  static DSA_DEVICE int row_exponent(u32 largest) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const u32 other = ptx::shuffle_xor(largest, mask);
      largest = largest > other ? largest : other;
    }
    if (largest >= 0x7f80u || largest == 0) return 0;
    const int exponent = static_cast<int>(largest >> 7) - 127 - 14;
    return exponent < -100 ? -100 : exponent;
  }
};

}  // namespace sparse_decode
