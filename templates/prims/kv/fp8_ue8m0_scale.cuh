// KV rows of e4m3 values with one power of two (ue8m0, a byte) per 32 or 64 dims, then bf16 RoPE dims if any. On keys a
// scale multiplies the fp32 partial score of its group, on values it multiplies the probabilities or the values, whichever
// are fewer. No dequantised row exists anywhere; both matrix operands come from the raw bytes.
#pragma once
#include "prims/kv/bf16_operands.cuh"
#include "prims/kv/e4m3_operands.cuh"
#include "prims/kv/probability.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"
#include "prims/ptx/packed.cuh"
#include "prims/ptx/shared.cuh"

namespace kv {

template <class C>
struct Fp8Ue8m0Scale : Bf16Probability {
  using Row = C;
  static constexpr int kGroupDims = C::kScaleGroupDims;
  static constexpr int kGroups = C::kNopeDims / kGroupDims;
  static constexpr int kProbabilityCopies = 1;
  static constexpr bool kNormaliseQuery = true;  // q becomes f16
  static constexpr int kPlainValueDims = C::kValueDims - C::kNopeDims;
  static constexpr int kWarpDims = C::kValueDims / C::kValueWarps;
  static constexpr int kWarpGroups = kWarpDims > kGroupDims ? kWarpDims / kGroupDims : 1;
  // A multiplication scales two probabilities of a head tile or two values of 8 rows; there are kWarpDims / 8 such rows.
  static constexpr bool kScalesProbabilities = kWarpGroups * C::kHeads / 8 <= kWarpDims / 8;
  // Values enter the product as code x 2^-120 (their exponent field is left as it is). Half of that is returned by the
  // probabilities or with the scale, half by the output factor, so that neither leaves the range of bf16 or fp32.
  static constexpr float kProbabilityScale = kScalesProbabilities ? 0x1p60f : 1.0f;
  static constexpr float kOutputScale = 0x1p60f;
  static_assert(C::kNopeDims % kGroupDims == 0 && kGroupDims % 32 == 0 && C::kRopeDims % 32 == 0);
  static_assert(kPlainValueDims == 0 || kPlainValueDims == C::kRopeDims, "values hold all rotary dims or none");
  static_assert(C::kNopeDims % kWarpDims == 0 && kWarpGroups <= 2, "a warp's values are all quantised or all plain");

  // Eight bf16 q values of dims 8 chunk.. -> query image, times `factor` (a power of two). A key word holds the dims
  // 16 j + 4 c .. + 3 of lane column c in k step j: the pairs at k = 2 c and k = 2 c + 8.
  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float factor) {
    const int dim = 8 * chunk;
    if (dim < C::kNopeDims) {
      const u32 at = image_row + dim / 16 * 32 + dim % 16;
      ptx::store_shared_8(at, pair(f16_query(q.x, factor), f16_query(q.z, factor)));
      ptx::store_shared_8(at + 16, pair(f16_query(q.y, factor), f16_query(q.w, factor)));
    } else {
      const auto scaled = [&](u32 w) {
        return ptx::pack_bf16(ptx::float_of(w << 16) * factor, ptx::float_of(w & 0xffff0000u) * factor);
      };
      ptx::store_shared_16(image_row + 2 * dim, Words4{scaled(q.x), scaled(q.y), scaled(q.z), scaled(q.w)});
    }
  }

  static DSA_DEVICE u64 pair(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }

  static DSA_DEVICE float scale(u32, int) { return 1.0f; }

  // s[m][j] += scores of the 16 tokens of block m (rows at `rows`, blocks adjacent) against head tile j of the query image
  // at `query`. One query fragment serves all blocks.
  template <int kRows, int kTiles>
  static DSA_DEVICE void score(float (&s)[kRows][kTiles][4], u32 rows, u32 query, int lane) {
    const u32 query_lane = query + (lane % 8) * C::kQueryPitchBytes + (lane / 8) * 16;
    add_bf16_scores<C::kRopeDims / 16, C::kRowPitchBytes, C::kQueryPitchBytes>(s, rows + C::kRopeOffsetBytes,
                                                                              query_lane + 2 * C::kNopeDims, lane);
    const u32 key = rows + (lane % 16) * C::kRowPitchBytes + (lane / 16) * 16;
    const u32 scales = rows + (lane / 4) * C::kRowPitchBytes + C::kScaleOffsetBytes;
    constexpr int kTogether = C::kGroupsTogether, kWhole = kGroups / kTogether * kTogether;
#pragma unroll 1
    for (int g = 0; g < kWhole; g += kTogether) add_groups<kTogether>(s, scales, key, query_lane, g);
    if constexpr (kWhole < kGroups) add_groups<kGroups - kWhole>(s, scales, key, query_lane, kWhole);
  }

  // Groups g .. g + kTogether - 1; each is a chain of its own, so that none waits for itself.
  template <int kTogether, int kRows, int kTiles>
  static DSA_DEVICE void add_groups(float (&s)[kRows][kTiles][4], u32 scales, u32 key, u32 query_lane, int g) {
    float acc[kTogether][kRows][kTiles][4] = {};
#pragma unroll
    for (int pair = 0; pair < kGroupDims / 32; ++pair)  // of k steps
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const int column = (g + t) * kGroupDims + 32 * pair;
        Words4 b[kTiles];
        u32 a[kRows][2][4];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) b[j] = ptx::load_matrix_x4(query_lane + j * 8 * C::kQueryPitchBytes + 2 * column);
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          const Words4 w = ptx::load_matrix_x4(key + 16 * m * C::kRowPitchBytes + column);
          key_pairs(w.x, a[m][0][0], a[m][0][2]);
          key_pairs(w.y, a[m][0][1], a[m][0][3]);
          key_pairs(w.z, a[m][1][0], a[m][1][2]);
          key_pairs(w.w, a[m][1][1], a[m][1][3]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
              const u32(&k)[4] = a[m][i];
              ptx::mma_f16(acc[t][m][j], k[0], k[1], k[2], k[3], i == 0 ? b[j].x : b[j].z, i == 0 ? b[j].y : b[j].w);
            }
      }
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 bytes = load_scales<kTogether>(scales + (16 * m + 8 * half) * C::kRowPitchBytes + g);
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          const float factor = power_of(bytes, t) * kKeyScale;
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) s[m][j][2 * half + e] = acc[t][m][j][2 * half + e] * factor + s[m][j][2 * half + e];
        }
      }
  }

  // Scales of kCount groups, in the low bytes; kCount is a power of two and the address a multiple of it.
  template <int kCount>
  static DSA_DEVICE u32 load_scales(u32 address) {
    static_assert(kCount == 1 || kCount == 2 || kCount == 4);
    return kCount == 4 ? ptx::load_shared_4(address) : kCount == 2 ? ptx::load_shared_2(address) : ptx::load_shared_1(address);
  }

  // The power of two that a byte of a word stands for: its exponent, 2^-127 for 0, NaN for 255 (infinity times 0).
  static DSA_DEVICE float power_of(u32 word, int byte) {
    const u32 bits = (byte == 3 ? word >> 1 : word << (23 - 8 * byte)) & 0x7f800000u;
    const float power = ptx::float_of(bits > 0x00400000u ? bits : 0x00400000u);
    return power * 0.0f + power;
  }

  static constexpr bool kJoinsBlocks = false;
  static constexpr int kBlocksPerLoad = 2;  // m16 blocks that one call of Values::load yields
  static constexpr bool kRowsAreNeighbours = true;

  // Quantised values of 16 tokens at `rows` for the kDims dims from `dim`. Row r of block i is dim 16 i + 2 r, row r + 8
  // the next.
  template <int kDims, int kHeadTiles>
  struct Values {
    static constexpr int kScaledBlocks = kScalesProbabilities ? kGroupDims / 16 : 0;  // that share a factor of probabilities
    static_assert(kDims == kWarpDims && kHeadTiles == C::kHeads / 8);
    u32 row;
    u32 scale[2];  // tokens 2 c, 2 c + 1 and those 8 further: scale bytes of a pair's first token at 0.., its second at 16..

    DSA_DEVICE Values(u32 rows, int dim, int lane) : row(rows + (lane % 16) * C::kRowPitchBytes + dim + (lane / 16) * 16) {
      const u32 at = rows + 2 * (lane % 4) * C::kRowPitchBytes + C::kScaleOffsetBytes + dim / kGroupDims;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        scale[half] = load_scales<kWarpGroups>(at + 8 * half * C::kRowPitchBytes) |
                      load_scales<kWarpGroups>(at + (8 * half + 1) * C::kRowPitchBytes) << 16;
    }

    // The scales of a block's dims, as bf16 of two tokens.
    DSA_DEVICE u32 factors(int block, int half) const {
      const u32 bytes = scale[half] >> 8 * (16 * block / kGroupDims) & 0x00ff00ffu;
      return (kScalesProbabilities ? bytes : bytes + 0x003c003cu) << 7;  // 60 more where the values bear it
    }

    // A fragments of two blocks, times 2^-120, or times the scale and 2^-60.
    DSA_DEVICE void load(u32 (&a)[kBlocksPerLoad][4], int block) const {
      const Words4 w = ptx::load_matrix_x4_trans(row + 16 * block);
      value_pairs(w.x, a[0][0], a[0][1]);
      value_pairs(w.y, a[0][2], a[0][3]);
      value_pairs(w.z, a[1][0], a[1][1]);
      value_pairs(w.w, a[1][2], a[1][3]);
      if constexpr (!kScalesProbabilities) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 factor = factors(block, i / 2);
          a[0][i] = ptx::mul_bf16x2(a[0][i], factor), a[1][i] = ptx::mul_bf16x2(a[1][i], factor);
        }
      }
    }
  };

  // The same of rotary dims, which are plain; row r of a block is its dim r.
  template <int kDims, int kHeadTiles>
  struct PlainValues {
    static constexpr int kScaledBlocks = kDims / 16;
    u32 column;
    int lane;

    DSA_DEVICE PlainValues(u32 rows, int dim, int lane_)
        : column(rows + C::kRopeOffsetBytes + 2 * (dim - C::kNopeDims)), lane(lane_) {}

    // 2^-60 over what the probabilities bear.
    DSA_DEVICE u32 factors(int, int) const { return kScalesProbabilities ? 0x03800380u : 0x21802180u; }

    DSA_DEVICE void load(u32 (&a)[kBlocksPerLoad][4], int block) const {
      plain_value_block<C::kRowPitchBytes>(a[0], column + 32 * block, lane);
      plain_value_block<C::kRowPitchBytes>(a[1], column + 32 * block + 32, lane);
    }
  };

  // Within a warp's dims, block row lane / 4 is dim block_dim + lane_dim, and the row 8 below is the next.
  static constexpr DSA_DEVICE int block_dim(int block) { return 16 * block; }
  static DSA_DEVICE int lane_dim(int lane) { return 2 * (lane / 4); }
};

}  // namespace kv
