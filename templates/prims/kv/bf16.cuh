// KV rows of plain bf16 values; the first kValueDims of a row are its value.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"

namespace kv {

template <class C>
struct Bf16 {
  static constexpr int kProbabilityCopies = 1;
  static constexpr bool kNormaliseQuery = false;  // q stays bf16 as it came
  static constexpr float kProbabilityScale = 1.0f;
  static constexpr float kOutputScale = 1.0f;
  static constexpr int kSteps = (C::kNopeDims + C::kRopeDims) / 16;
  static_assert(kSteps % 2 == 0);

  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float) {
    ptx::store_shared_16(image_row + 16 * chunk, q);
  }

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
          ptx::mma_bf16(s[m][j], a[m][0].x, a[m][0].y, a[m][0].z, a[m][0].w, b[j].x, b[j].y);
          ptx::mma_bf16(other[m][j], a[m][1].x, a[m][1].y, a[m][1].z, a[m][1].w, b[j].z, b[j].w);
        }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][j][i] += other[m][j][i];
  }

  static constexpr int kBlocksPerLoad = 1;  // m16 blocks that one value_blocks call yields

  // A fragment (values transposed) of 16 tokens at `rows` for the 16 dims from `dim`; row r is dim + r.
  static DSA_DEVICE void value_blocks(u32 (&a)[kBlocksPerLoad][4], u32 rows, int dim, int lane) {
    // Matrices in fragment order: dims 0-7 tokens 0-7, dims 8-15 tokens 0-7, dims 0-7 tokens 8-15, dims 8-15 tokens 8-15.
    const int token = (lane / 16) * 8 + lane % 8, half = lane / 8 % 2;
    const Words4 w = ptx::load_matrix_x4_trans(rows + token * C::kRowPitchBytes + 2 * dim + half * 16);
    a[0][0] = w.x, a[0][1] = w.y, a[0][2] = w.z, a[0][3] = w.w;
  }

  static constexpr bool kRowsAreNeighbours = false;
};

}  // namespace kv
