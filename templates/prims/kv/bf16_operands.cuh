// Matrix operands from rows of bf16: rotary dims behind quantised ones, which no scale multiplies.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"

namespace kv {

// s[m][j] += products of kSteps x 16 bf16 dims: those of the keys begin at `rows` (plus 16 m rows of kPitch bytes), those
// of the query image at `query` (kQueryPitch bytes a head), both in their natural order.
template <int kSteps, int kPitch, int kQueryPitch, int kRows, int kTiles>
DSA_DEVICE void add_bf16_scores(float (&s)[kRows][kTiles][4], u32 rows, u32 query_lane, int lane) {
  const u32 key = rows + (lane % 16) * kPitch + (lane / 16) * 16;
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
    Words4 a[kRows][2], b[kTiles];
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) a[m][i] = ptx::load_matrix_x4(key + 16 * m * kPitch + (step + i) * 32);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) b[j] = ptx::load_matrix_x4(query_lane + j * 8 * kQueryPitch + step * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int m = 0; m < kRows; ++m)
          ptx::mma_bf16(s[m][j], a[m][i].x, a[m][i].y, a[m][i].z, a[m][i].w, i == 0 ? b[j].x : b[j].z, i == 0 ? b[j].y : b[j].w);
  }
}

// A fragment (values transposed) of 16 tokens of kPitch bytes for the 16 dims at `column`; row r is dim r of them. Matrices
// in fragment order: dims 0-7 tokens 0-7, dims 8-15 tokens 0-7, dims 0-7 tokens 8-15, dims 8-15 tokens 8-15.
template <int kPitch>
DSA_DEVICE void plain_value_block(u32 (&a)[4], u32 column, int lane) {
  const int token = (lane / 16) * 8 + lane % 8, half = lane / 8 % 2;
  const Words4 w = ptx::load_matrix_x4_trans(column + token * kPitch + half * 16);
  a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
}

}  // namespace kv
