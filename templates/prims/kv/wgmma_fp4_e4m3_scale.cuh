// As fp4_e4m3_scale.cuh for warpgroup products.
#pragma once
#include "prims/kv/fp4_e4m3_scale.cuh"
#include "prims/kv/wgmma_scores.cuh"
#include "prims/ptx/wgmma.cuh"
#include "prims/tile/operand_image.cuh"

namespace kv {

template <class C>
struct WgmmaFp4E4m3Scale : Fp4E4m3Scale<C> {
  using Base = Fp4E4m3Scale<C>;
  using Image = tile::OperandImage<C::kHeads>;

  // As Base::stage_query, for the image of a warpgroup's operand.
  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float factor) {
    const u32 dims[4] = {f16_query(q.x, factor), f16_query(q.y, factor), f16_query(q.z, factor), f16_query(q.w, factor)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = Base::key_nibble(i, 0), high = Base::key_nibble(i, 1);
      ptx::store_shared_4(Image::unit(image_row, chunk / 4 * 4 + i) + chunk % 4 * 4,
                          ptx::permute_bytes(dims[low / 2], dims[high / 2], low % 2 == 0 ? 0x5410 : 0x7632));
    }
  }

  // A warp's 16 tokens, a unit per 64 dims.
  struct Keys {
    static constexpr int kUnits = C::kNopeDims / 64, kSteps = 4;
    u32 key, scales, own;

    DSA_DEVICE Keys(u32 rows, int lane)
        : key(rows + (lane % 16) * C::kRowPitchBytes + (lane / 16) * 16),
          scales(rows + (lane / 4) * C::kRowPitchBytes + C::kScaleOffsetBytes),
          own(lane % 4 < 2 ? 0x6420u : 0x7531u) {}

    DSA_DEVICE void load(u32 (&a)[kSteps][4], int unit) const {
      const Words4 w = ptx::load_matrix_x4(key + 32 * unit);
      u32 two[2], factor[2][2];
      const u32 at = scales + 4 * unit;
      Base::key_scales(ptx::permute_bytes(ptx::load_shared_4(at), ptx::load_shared_4(at + 8 * C::kRowPitchBytes), own), two[0], two[1]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factor[half][0] = ptx::permute_bytes(two[half], 0, 0x1010), factor[half][1] = ptx::permute_bytes(two[half], 0, 0x3232);
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // 32 dims, two k steps
        u32 low[4], high[4];
        Base::key_pairs(part == 0 ? w.x : w.z, low);
        Base::key_pairs(part == 0 ? w.y : w.w, high);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32(&step)[4] = a[2 * part + i];
          step[0] = ptx::mul_f16x2(low[2 * i], factor[0][part]), step[1] = ptx::mul_f16x2(high[2 * i], factor[1][part]);
          step[2] = ptx::mul_f16x2(low[2 * i + 1], factor[0][part]), step[3] = ptx::mul_f16x2(high[2 * i + 1], factor[1][part]);
        }
      }
    }

    template <bool kAdd, int kTiles>
    static DSA_DEVICE void multiply(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) {
      ptx::Wgmma<kAdd, kTiles>::f16(d, a, b);
    }
  };

  // s[j] = scores of the warp's 16 tokens, rows at `rows`, against head tile j of the query image. The four warps of a
  // warpgroup call together, each for its own tokens.
  template <int kTiles>
  static DSA_DEVICE void score(float (&s)[kTiles][4], u32 rows, u64 query, int lane) {
    plain_unit_scores<Image>(s, Keys(rows, lane), query);
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] *= Base::kKeyFactor;
  }

  template <int kTiles>
  static DSA_DEVICE void add_values(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) {
    ptx::Wgmma<true, kTiles>::bf16(d, a, b);
  }
};

}  // namespace kv
