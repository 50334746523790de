// KV rows of e4m3 values with one fp32 scale per 128 dims, then bf16 RoPE dims. Scales are arbitrary and honoured exactly:
// on keys they multiply the fp32 partial score of their group, on values they are folded into one bf16 copy of the
// probabilities per group. No dequantised row exists anywhere; both matrix operands come from the raw bytes.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"

namespace kv {

template <class C>
struct Fp8Fp32Scale {
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

  // One word of e4m3 codes -> f16 pairs (bytes 0, 1) and (bytes 2, 3), each times 1 / kCodeScale.
#if __CUDA_ARCH__ >= 890
  static constexpr float kCodeScale = 1.0f;
  static DSA_DEVICE void key_pairs(u32 w, u32& low, u32& high) { ptx::e4m3_to_f16(w, low, high); }
#else
  // No conversion instruction: an e4m3 code shifted into f16's exponent field reads 2^-8 times its value. Code 0x7f (NaN)
  // reads as 480 here.
  static constexpr float kCodeScale = 256.0f;
  static DSA_DEVICE void key_pairs(u32 w, u32& low, u32& high) {
    const u32 y0 = (w & 0xffu) << 8 | (w & 0xff00u) << 16, y1 = (w & 0xff0000u) >> 8 | (w & 0xff000000u);
    low = (y0 & 0x80008000u) | ((y0 & 0x7f007f00u) >> 1);
    high = (y1 & 0x80008000u) | ((y1 & 0x7f007f00u) >> 1);
  }
#endif

  static DSA_DEVICE float scale(u32 row, int group) {
    return ptx::float_of(ptx::load_shared_4(row + C::kNopeDims + 4 * group));
  }

  // s[m][j] += scores of the 16 tokens of block m (rows at `rows`, blocks adjacent) against head tile j of the query image
  // at `query`. One query fragment serves all blocks.
  template <int kRows, int kTiles>
  static DSA_DEVICE void score(float (&s)[kRows][kTiles][4], u32 rows, u32 query, int lane) {
    const u32 row = rows + (lane / 4) * C::kRowPitchBytes;
    const u32 query_lane = query + (lane % 8) * C::kQueryPitchBytes + (lane / 8) * 16;
    score_rope(s, rows, query_lane, lane);
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
          const float low = scale(row + 16 * m * C::kRowPitchBytes, g + t) * kCodeScale;
          const float high = scale(row + (16 * m + 8) * C::kRowPitchBytes, g + t) * kCodeScale;
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

  // The bf16 RoPE dims: plain matrix loads of the rows, accumulated unscaled.
  template <int kRows, int kTiles>
  static DSA_DEVICE void score_rope(float (&s)[kRows][kTiles][4], u32 rows, u32 query_lane, int lane) {
    const u32 key = rows + (lane % 16) * C::kRowPitchBytes + C::kRopeOffsetBytes + (lane / 16) * 16;
#pragma unroll
    for (int step = 0; step < C::kRopeDims / 16; step += 2) {
      Words4 a[kRows][2], b[kTiles];
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) a[m][i] = ptx::load_matrix_x4(key + 16 * m * C::kRowPitchBytes + (step + i) * 32);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        b[j] = ptx::load_matrix_x4(query_lane + j * 8 * C::kQueryPitchBytes + 2 * C::kNopeDims + step * 32);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int m = 0; m < kRows; ++m)
            ptx::mma_bf16(s[m][j], a[m][i].x, a[m][i].y, a[m][i].z, a[m][i].w, i == 0 ? b[j].x : b[j].z, i == 0 ? b[j].y : b[j].w);
    }
  }

  static constexpr int kBlocksPerLoad = 2;  // m16 blocks that one value_blocks call yields

  // A fragments (values transposed, times 2^-120) of 16 tokens at `rows` for the 32 dims from `dim`. Row r of block i is
  // dim 16 i + 2 r, row r + 8 the dim after it.
  static DSA_DEVICE void value_blocks(u32 (&a)[kBlocksPerLoad][4], u32 rows, int dim, int lane) {
    const Words4 w = ptx::load_matrix_x4_trans(rows + (lane % 16) * C::kRowPitchBytes + dim + (lane / 16) * 16);
    value_pairs(w.x, a[0][0], a[0][1]);
    value_pairs(w.y, a[0][2], a[0][3]);
    value_pairs(w.z, a[1][0], a[1][1]);
    value_pairs(w.w, a[1][2], a[1][3]);
  }

  // Even and odd bytes of w as bf16 pairs, value x 2^-120: e4m3's exponent field lands in the low bits of bf16's.
  static DSA_DEVICE void value_pairs(u32 w, u32& even, u32& odd) {
    even = ((w << 8) & 0x80008000u) | ((w << 4) & 0x07f007f0u);
    odd = (w & 0x80008000u) | ((w >> 4) & 0x07f007f0u);
  }

  // Dims of the two rows (r, r + 8) of a block that a lane holds, and whether they are neighbours.
  static constexpr bool kRowsAreNeighbours = true;
};

}  // namespace kv
