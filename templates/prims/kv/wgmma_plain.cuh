// As plain.cuh for warpgroup products.
#pragma once
#include "prims/kv/plain.cuh"
#include "prims/kv/wgmma_scores.cuh"
#include "prims/ptx/wgmma.cuh"
#include "prims/tile/operand_image.cuh"

namespace kv {

// Multiply<kAdd, kTiles>::run: the product of the rows' type.
template <class C, class Rows, template <bool, int> class Multiply>
struct WgmmaPlain : Rows {
  using Image = tile::OperandImage<C::kHeads>;

  // A warp's 16 tokens, a unit per 64 dims.
  struct Keys {
    static constexpr int kUnits = (C::kNopeDims + C::kRopeDims) / 64, kSteps = 4;
    u32 key;

    DSA_DEVICE Keys(u32 rows, int lane) : key(rows + (lane % 16) * C::kRowPitchBytes + (lane / 16) * 16) {}

    DSA_DEVICE void load(u32 (&a)[kSteps][4], int unit) const {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const Words4 w = ptx::load_matrix_x4(key + 128 * unit + 32 * step);
        a[step][0] = w.x, a[step][1] = w.y, a[step][2] = w.z, a[step][3] = w.w;
      }
    }

    template <bool kAdd, int kTiles>
    static DSA_DEVICE void multiply(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) {
      Multiply<kAdd, kTiles>::run(d, a, b);
    }
  };

  // s[j] = scores of the warp's 16 tokens, rows at `rows`, against head tile j of the query image. The four warps of a
  // warpgroup call together, each for its own tokens.
  template <int kTiles>
  static DSA_DEVICE void score(float (&s)[kTiles][4], u32 rows, u64 query, int lane) {
    plain_unit_scores<Image>(s, Keys(rows, lane), query);
  }

  template <int kTiles>
  static DSA_DEVICE void add_values(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) {
    Multiply<true, kTiles>::run(d, a, b);
  }
};

template <bool kAdd, int kTiles>
struct MultiplyBf16 {
  static DSA_DEVICE void run(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) { ptx::Wgmma<kAdd, kTiles>::bf16(d, a, b); }
};

template <bool kAdd, int kTiles>
struct MultiplyF16 {
  static DSA_DEVICE void run(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) { ptx::Wgmma<kAdd, kTiles>::f16(d, a, b); }
};

template <class C>
struct WgmmaBf16 : WgmmaPlain<C, Bf16<C>, MultiplyBf16> {
  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float) {
    ptx::store_shared_16(tile::OperandImage<C::kHeads>::unit(image_row, chunk), q);
  }
};

template <class C>
struct WgmmaFp16 : WgmmaPlain<C, Fp16<C>, MultiplyF16> {
  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float factor) {
    ptx::store_shared_16(tile::OperandImage<C::kHeads>::unit(image_row, chunk),
                         Words4{f16_query(q.x, factor), f16_query(q.y, factor), f16_query(q.z, factor), f16_query(q.w, factor)});
  }
};

}  // namespace kv
