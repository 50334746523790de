// KV rows of e4m3 values with one fp32 scale per 128 dims, then bf16 RoPE dims if any. Scales are arbitrary and honoured
// exactly: on keys they multiply the fp32 partial score of their group, on values they are folded into one bf16 copy of the
// probabilities per group. No dequantised row exists anywhere; both matrix operands come from the raw bytes.
#pragma once
#include "prims/kv/bf16_operands.cuh"
#include "prims/kv/e4m3_operands.cuh"
#include "prims/kv/probability.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"

namespace kv {

template <class C>
struct Fp8Fp32Scale : Bf16Probability {
  using Row = C;
  static constexpr int kGroupDims = 128;
  static constexpr int kGroups = C::kNopeDims / kGroupDims;
  static constexpr int kProbabilityCopies = kGroups;
  static constexpr bool kNormaliseQuery = true;  // q becomes f16: see stage_query
  // Values enter the product as code x 2^-120 (their exponent field is left as it is). Half of that is returned by the
  // probabilities, half by the output factor, so that neither leaves the range of bf16 or fp32.
  static constexpr float kProbabilityScale = 0x1p60f;
  static constexpr float kOutputScale = 0x1p60f;
  static_assert(C::kNopeDims % kGroupDims == 0 && C::kValueDims == C::kNopeDims && C::kRopeDims % 32 == 0);

  // Byte of the query image (one head row) where the 4 dims starting at `dim` (a multiple of 4) begin; the second pair
  // lies 16 bytes further. The order is the one in which score() reads 32 raw key bytes per lane: dim 128 g + 32 c + 4 s
  // + u sits in k step 8 g + s at k = 2 c + (u & 1) + 8 (u >> 1).
  static DSA_DEVICE int query_byte(int dim) {
    const int group = dim / kGroupDims, c = dim % kGroupDims / 32, s = dim % 32 / 4;
    return (8 * group + s) * 32 + 4 * c;
  }

  // Eight bf16 q values of dims 8 chunk.. -> query image, times `factor` (a power of two).
  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float factor) {
    const u32 words[4] = {q.x, q.y, q.z, q.w};
    const int dim = 8 * chunk;
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = ptx::float_of(words[i] << 16) * factor, high = ptx::float_of(words[i] & 0xffff0000u) * factor;
      packed[i] = dim < C::kNopeDims ? ptx::pack_f16(low, high) : ptx::pack_bf16(low, high);
    }
    if (dim < C::kNopeDims) {
      const u32 at = image_row + query_byte(dim);  // dims +4..+7 are the next k step: 32 bytes further
      ptx::store_shared_4(at, packed[0]);
      ptx::store_shared_4(at + 16, packed[1]);
      ptx::store_shared_4(at + 32, packed[2]);
      ptx::store_shared_4(at + 48, packed[3]);
    } else {
      ptx::store_shared_16(image_row + 2 * dim, Words4{packed[0], packed[1], packed[2], packed[3]});
    }
  }

  static DSA_DEVICE float scale(u32 row, int group) {
    return ptx::float_of(ptx::load_shared_4(row + C::kNopeDims + 4 * group));
  }

  // s[m][j] += scores of the 16 tokens of block m (rows at `rows`, blocks adjacent) against head tile j of the query image
  // at `query`. One query fragment serves all blocks.
  template <int kRows, int kTiles>
  static DSA_DEVICE void score(float (&s)[kRows][kTiles][4], u32 rows, u32 query, int lane) {
    const u32 row = rows + (lane / 4) * C::kRowPitchBytes;
    const u32 query_lane = query + (lane % 8) * C::kQueryPitchBytes + (lane / 8) * 16;
    add_bf16_scores<C::kRopeDims / 16, C::kRowPitchBytes, C::kQueryPitchBytes>(s, rows + C::kRopeOffsetBytes,
                                                                              query_lane + 2 * C::kNopeDims, lane);
    // One accumulator chain would wait for itself: groups side by side are independent chains, as far as registers allow.
    constexpr int kTogether = C::kGroupsTogether;
    static_assert(kGroups % kTogether == 0);
    constexpr int kHalvesUnrolled = kRows * kTiles > 4 ? 1 : 2;  // both halves' rows at once would spill
#pragma unroll 1
    for (int g = 0; g < kGroups; g += kTogether) {
      float acc[kTogether][kRows][kTiles][4] = {};
#pragma unroll kHalvesUnrolled
      for (int half = 0; half < 2; ++half) score_half<kTogether>(acc, row, query_lane, lane, g, half);
#pragma unroll
      for (int t = 0; t < kTogether; ++t)
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          const float low = scale(row + 16 * m * C::kRowPitchBytes, g + t) * kKeyScale;
          const float high = scale(row + (16 * m + 8) * C::kRowPitchBytes, g + t) * kKeyScale;
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            s[m][j][0] = acc[t][m][j][0] * low + s[m][j][0];
            s[m][j][1] = acc[t][m][j][1] * low + s[m][j][1];
            s[m][j][2] = acc[t][m][j][2] * high + s[m][j][2];
            s[m][j][3] = acc[t][m][j][3] * high + s[m][j][3];
          }
        }
    }
  }

  // Four k steps (16 raw bytes per lane and row) of groups g .. g + kTogether - 1.
  template <int kTogether, int kRows, int kTiles>
  static DSA_DEVICE void score_half(float (&acc)[kTogether][kRows][kTiles][4], u32 row, u32 query_lane, int lane, int g, int half) {
    u32 low[kTogether][kRows][4], high[kTogether][kRows][4];
#pragma unroll
    for (int t = 0; t < kTogether; ++t)
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        const u32 at = row + 16 * m * C::kRowPitchBytes + kGroupDims * (g + t) + 32 * (lane % 4) + 16 * half;
        const Words4 a = ptx::load_shared_16(at), b = ptx::load_shared_16(at + 8 * C::kRowPitchBytes);
        low[t][m][0] = a.x, low[t][m][1] = a.y, low[t][m][2] = a.z, low[t][m][3] = a.w;
        high[t][m][0] = b.x, high[t][m][1] = b.y, high[t][m][2] = b.z, high[t][m][3] = b.w;
      }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      u32 a[kTogether][kRows][2][4];
      Words4 b[kTogether][kTiles];
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const int step = 8 * (g + t) + 4 * half + 2 * pair;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) b[t][j] = ptx::load_matrix_x4(query_lane + j * 8 * C::kQueryPitchBytes + step * 32);
#pragma unroll
        for (int m = 0; m < kRows; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            key_pairs(low[t][m][2 * pair + i], a[t][m][i][0], a[t][m][i][2]);
            key_pairs(high[t][m][2 * pair + i], a[t][m][i][1], a[t][m][i][3]);
          }
      }
      // Steps outermost: an accumulator meets itself again only after all others.
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int t = 0; t < kTogether; ++t)
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
              const u32(&k)[4] = a[t][m][i];
              ptx::mma_f16(acc[t][m][j], k[0], k[1], k[2], k[3], i == 0 ? b[t][j].x : b[t][j].z, i == 0 ? b[t][j].y : b[t][j].w);
            }
    }
  }

  static constexpr bool kJoinsBlocks = false;
  static constexpr int kBlocksPerLoad = 2;  // m16 blocks that one call of Values::load yields
  static constexpr bool kRowsAreNeighbours = true;

  // Values of 16 tokens at `rows` for the kDims dims from `dim`. Row r of block i is dim 16 i + 2 r, row r + 8 the next.
  template <int kDims, int kHeadTiles>
  struct Values {
    static constexpr int kScaledBlocks = 0;
    u32 row;

    DSA_DEVICE Values(u32 rows, int dim, int lane) : row(rows + (lane % 16) * C::kRowPitchBytes + dim + (lane / 16) * 16) {}

    // A fragments, times 2^-120, of two blocks.
    DSA_DEVICE void load(u32 (&a)[kBlocksPerLoad][4], int block) const {
      const Words4 w = ptx::load_matrix_x4_trans(row + 16 * block);
      value_pairs(w.x, a[0][0], a[0][1]);
      value_pairs(w.y, a[0][2], a[0][3]);
      value_pairs(w.z, a[1][0], a[1][1]);
      value_pairs(w.w, a[1][2], a[1][3]);
    }
  };

  // Within a warp's dims, block row lane / 4 is dim block_dim + lane_dim, and the row 8 below is the next.
  static constexpr DSA_DEVICE int block_dim(int block) { return 16 * block; }
  static DSA_DEVICE int lane_dim(int lane) { return 2 * (lane / 4); }
};

}  // namespace kv
