// KV rows of e2m1 values with one positive e4m3 scale per 16 dims. Products of code and scale have six significant bits, so
// that they are exact in f16 (keys) and in bf16 (values), where they become matrix operands in registers.
#pragma once
#include "prims/kv/e4m3_operands.cuh"
#include "prims/kv/probability.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"
#include "prims/ptx/packed.cuh"

namespace kv {

template <class C>
struct Fp4E4m3Scale : Bf16Probability {
  using Row = C;
  static constexpr int kProbabilityCopies = 1;
  static constexpr bool kNormaliseQuery = true;  // q becomes f16
  // Values enter the product as 2^-119 of themselves; the probabilities return 2^59, the output factor 2^60.
  static constexpr float kProbabilityScale = 0x1p59f;
  static constexpr float kOutputScale = 0x1p60f;
  static_assert(C::kScaleGroupDims == 16 && C::kRopeDims == 0 && C::kNopeDims % 64 == 0 && C::kValueDims <= C::kNopeDims);

  // Eight bf16 q values of dims 8 chunk.. -> query image, times `factor` (a power of two). A key word holds the dims
  // 32 j + 8 c .. + 7 of lane column c; the pairs that key_pairs makes of it go to k = 2 c and 2 c + 8 of k step 2 j, then
  // of the next.
  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float factor) {
    const u32 at = image_row + chunk / 4 * 64 + chunk % 4 * 4;
    const u32 dims[4] = {f16_query(q.x, factor), f16_query(q.y, factor), f16_query(q.z, factor), f16_query(q.w, factor)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = key_nibble(i, 0), high = key_nibble(i, 1);
      ptx::store_shared_4(at + 16 * i, ptx::permute_bytes(dims[low / 2], dims[high / 2], low % 2 == 0 ? 0x5410 : 0x7632));
    }
  }

  static DSA_DEVICE float scale(u32, int) { return 1.0f; }

  // Nibbles j and j + 4 of w as 16-bit floats: signs to bits 15 and 31, magnitudes to the mask's place `top` bits further up
  // than a nibble 0 has them. e2m1's exponent field lands in the low bits of the other's, so that f16 (top 9) reads 2^-14
  // times the value, bf16 (top 6) 2^-126 times.
  template <int kTop>
  static DSA_DEVICE u32 code_pair(u32 w, int j) {
    const u32 sign = j == 3 ? w : w << (12 - 4 * j);
    const u32 magnitude = kTop >= 4 * j ? w << (kTop - 4 * j) : w >> (4 * j - kTop);
    return (sign & 0x80008000u) | (magnitude & 0x00070007u << kTop);
  }

#if __CUDA_ARCH__ >= 890
  // The codes of a word as f16 pairs, times 1 / kKeyFactor, by way of e4m3: e2m1's exponent field lands in the low bits of
  // its one. Pair i holds nibbles key_nibble(i, 0) and key_nibble(i, 1): even ones first.
  static constexpr float kKeyFactor = 0x1p6f;
  static constexpr DSA_DEVICE int key_nibble(int i, int half) { return 4 * (i % 2) + i / 2 + 2 * half; }
  static DSA_DEVICE void key_pairs(u32 w, u32 (&pair)[4]) {
    ptx::e4m3_to_f16((w << 4 & 0x80808080u) | (w << 2 & 0x1c1c1c1cu), pair[0], pair[1]);
    ptx::e4m3_to_f16((w & 0x80808080u) | (w >> 2 & 0x1c1c1c1cu), pair[2], pair[3]);
  }

  // Four scales in the bytes of a word as f16: bytes 0 and 1, bytes 2 and 3.
  static DSA_DEVICE void key_scales(u32 w, u32& low, u32& high) { ptx::e4m3_to_f16(w, low, high); }
#else
  static constexpr float kKeyFactor = 0x1p14f;
  static constexpr DSA_DEVICE int key_nibble(int i, int half) { return i + 4 * half; }
  static DSA_DEVICE void key_pairs(u32 w, u32 (&pair)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = code_pair<9>(w, i);
  }

  // Shifted into f16's exponent field a scale reads 2^-8 of its value. Code 0x7f (NaN) reads as 480 here.
  static DSA_DEVICE void key_scales(u32 w, u32& low, u32& high) {
    low = ptx::mul_f16x2((w & 0x7fu) << 7 | (w & 0x7f00u) << 15, 0x5c005c00u);
    high = ptx::mul_f16x2((w & 0x7f0000u) >> 9 | (w & 0x7f000000u) >> 1, 0x5c005c00u);
  }
#endif

  // s[m][j] += scores of the 16 tokens of block m (rows at `rows`, blocks adjacent) against head tile j of the query image
  // at `query`. One query fragment serves all blocks.
  template <int kRows, int kTiles>
  static DSA_DEVICE void score(float (&s)[kRows][kTiles][4], u32 rows, u32 query, int lane) {
    const u32 query_lane = query + (lane % 8) * C::kQueryPitchBytes + (lane / 8) * 16;
    const u32 key = rows + (lane % 16) * C::kRowPitchBytes + (lane / 16) * 16;
    const u32 scales = rows + (lane / 4) * C::kRowPitchBytes + C::kScaleOffsetBytes;
    // Of two words with the scales of 64 dims: this lane's in the first 32 and in the next.
    const u32 own = lane % 4 < 2 ? 0x6420u : 0x7531u;
    constexpr int kChains = kRows * kTiles >= 4 ? 1 : 2;  // so that no accumulator waits for itself
    float acc[kChains][kRows][kTiles][4] = {};
#pragma unroll 2
    for (int column = 0; column < C::kNopeDims; column += 64) {
      u32 factor[kRows][2][2];
      Words4 w[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        w[m] = ptx::load_matrix_x4(key + 16 * m * C::kRowPitchBytes + column / 2);
        const u32 at = scales + 16 * m * C::kRowPitchBytes + column / 16;
        u32 two[2];
        key_scales(ptx::permute_bytes(ptx::load_shared_4(at), ptx::load_shared_4(at + 8 * C::kRowPitchBytes), own), two[0], two[1]);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          factor[m][half][0] = ptx::permute_bytes(two[half], 0, 0x1010), factor[m][half][1] = ptx::permute_bytes(two[half], 0, 0x3232);
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // 32 dims, two k steps
        Words4 b[kTiles];
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          b[j] = ptx::load_matrix_x4(query_lane + j * 8 * C::kQueryPitchBytes + 2 * (column + 32 * part));
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          u32 low[4], high[4];
          key_pairs(part == 0 ? w[m].x : w[m].z, low);
          key_pairs(part == 0 ? w[m].y : w[m].w, high);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const u32 a[4] = {ptx::mul_f16x2(low[2 * i], factor[m][0][part]), ptx::mul_f16x2(high[2 * i], factor[m][1][part]),
                              ptx::mul_f16x2(low[2 * i + 1], factor[m][0][part]),
                              ptx::mul_f16x2(high[2 * i + 1], factor[m][1][part])};
#pragma unroll
            for (int j = 0; j < kTiles; ++j)
              ptx::mma_f16(acc[i % kChains][m][j], a[0], a[1], a[2], a[3], i == 0 ? b[j].x : b[j].z, i == 0 ? b[j].y : b[j].w);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[m][j][i] += (kChains == 2 ? acc[0][m][j][i] + acc[kChains - 1][m][j][i] : acc[0][m][j][i]) * kKeyFactor;
  }

  static constexpr bool kJoinsBlocks = C::kHeads <= 32;  // more output leaves no registers for it
  static constexpr int kBlocksPerLoad = 2;  // m16 blocks that one call of Values::load yields
  static constexpr bool kRowsAreNeighbours = true;

  // Values of 16 tokens at `rows` for the kDims dims from `dim`. Of each 32 dims a lane row r has four: rows r and r + 8 of
  // the first block are dims 4 r and 4 r + 1, those of the second the next two.
  template <int kDims, int kHeadTiles>
  struct Values {
    static constexpr int kScaledBlocks = 0;
    static_assert(kDims == 64, "a warp reads the scales of its dims as one word");
    u32 row, own;
    u32 scale[4];  // of tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9

    DSA_DEVICE Values(u32 rows, int dim, int lane)
        : row(rows + (lane % 16) * C::kRowPitchBytes + dim / 2), own(lane / 16 == 0 ? 0x4400u : 0x5511u) {
      const u32 at = rows + 2 * (lane % 4) * C::kRowPitchBytes + C::kScaleOffsetBytes + dim / 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[i] = ptx::load_shared_4(at + (i / 2 * 8 + i % 2) * C::kRowPitchBytes);
    }

    // This lane's scale of two tokens in the 32 dims from `block` on, times 2^7. Moved into bf16's fields a code is 2^-120
    // of its value, subnormal ones too. (0x7f reads as 480; the score of such a token is NaN.)
    DSA_DEVICE u32 factors(int block, int half) const {
      const u32 codes = ptx::permute_bytes(scale[2 * half], scale[2 * half + 1], own + block / 2 * 0x2222u) & 0x007f007fu;
      return ptx::mul_bf16x2(codes << 4, 0x7f007f00u);
    }

    DSA_DEVICE void load(u32 (&a)[kBlocksPerLoad][4], int block) const {
      u32 w[2];
      ptx::load_matrix_x2_trans(w[0], w[1], row + 8 * block);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 factor = factors(block, half);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[i][2 * half] = ptx::mul_bf16x2(code_pair<6>(w[half], 2 * i), factor);
          a[i][2 * half + 1] = ptx::mul_bf16x2(code_pair<6>(w[half], 2 * i + 1), factor);
        }
      }
    }
  };

  // Within a warp's dims, block row lane / 4 is dim block_dim + lane_dim, and the row 8 below is the next.
  static constexpr DSA_DEVICE int block_dim(int block) { return 32 * (block / 2) + 2 * (block % 2); }
  static DSA_DEVICE int lane_dim(int lane) { return 4 * (lane / 4); }
};

}  // namespace kv
