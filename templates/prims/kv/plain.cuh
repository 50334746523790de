// KV rows of plain 16-bit values; the first kValueDims of a row are its value.
#pragma once
#include "prims/kv/bf16_operands.cuh"
#include "prims/kv/e4m3_operands.cuh"
#include "prims/kv/probability.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"

namespace kv {

// What rows of either type have in common. Probability: how they meet values, and so the type of both products.
template <class C, class Probability>
struct Plain : Probability {
  using Row = C;
  static constexpr int kProbabilityCopies = 1;
  static constexpr int kSteps = (C::kNopeDims + C::kRopeDims) / 16;
  static_assert(kSteps % 2 == 0);

  static DSA_DEVICE float scale(u32, int) { return 1.0f; }

  // s[m][j] += scores of the 16 tokens of block m (rows at `rows`, blocks adjacent) against head tile j of the query image
  // at `query`. One query fragment serves all blocks.
  template <int kRows, int kTiles>
  static DSA_DEVICE void score(float (&s)[kRows][kTiles][4], u32 rows, u32 query, int lane) {
    const u32 query_lane = query + (lane % 8) * C::kQueryPitchBytes + (lane / 8) * 16;
    const u32 key = rows + (lane % 16) * C::kRowPitchBytes + (lane / 16) * 16;
    float other[kRows][kTiles][4] = {};  // a second accumulator chain, so that neither waits for itself
#pragma unroll 3
    for (int step = 0; step < kSteps; step += 2) {
      Words4 a[kRows][2], b[kTiles];
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) a[m][i] = ptx::load_matrix_x4(key + 16 * m * C::kRowPitchBytes + (step + i) * 32);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) b[j] = ptx::load_matrix_x4(query_lane + j * 8 * C::kQueryPitchBytes + step * 32);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          const u32 even[4] = {a[m][0].x, a[m][0].y, a[m][0].z, a[m][0].w};
          const u32 odd[4] = {a[m][1].x, a[m][1].y, a[m][1].z, a[m][1].w};
          Probability::multiply_values(s[m][j], even, b[j].x, b[j].y);
          Probability::multiply_values(other[m][j], odd, b[j].z, b[j].w);
        }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][j][i] += other[m][j][i];
  }

  static constexpr bool kJoinsBlocks = false;
  static constexpr int kBlocksPerLoad = 1;  // m16 blocks that one call of Values::load yields
  static constexpr bool kRowsAreNeighbours = false;

  // Values of 16 tokens at `rows` for the kDims dims from `dim`; row r of a block is its dim r.
  template <int kDims, int kHeadTiles>
  struct Values {
    static constexpr int kScaledBlocks = 0;
    u32 column;
    int lane;

    DSA_DEVICE Values(u32 rows, int dim, int lane_) : column(rows + 2 * dim), lane(lane_) {}

    DSA_DEVICE void load(u32 (&a)[kBlocksPerLoad][4], int block) const {
      plain_value_block<C::kRowPitchBytes>(a[0], column + 32 * block, lane);
    }
  };
};

template <class C>
struct Bf16 : Plain<C, Bf16Probability> {
  static constexpr bool kNormaliseQuery = false;  // q stays bf16 as it came
  static constexpr float kProbabilityScale = 1.0f;
  static constexpr float kOutputScale = 1.0f;

  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float) {
    ptx::store_shared_16(image_row + 16 * chunk, q);
  }
};

template <class C>
struct Fp16 : Plain<C, F16Probability> {
  static constexpr bool kNormaliseQuery = true;  // q becomes f16
  // Probabilities of up to 2^kLazyThreshold stay in f16's range; those under 2^-14 lose at most 2^-32 of them.
  static constexpr float kProbabilityScale = 0x1p7f;
  static constexpr float kOutputScale = 0x1p-7f;
  static_assert(C::kLazyThreshold <= 8.0f);

  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float factor) {
    ptx::store_shared_16(image_row + 16 * chunk, Words4{f16_query(q.x, factor), f16_query(q.y, factor),
                                                        f16_query(q.z, factor), f16_query(q.w, factor)});
  }
};

}  // namespace kv
