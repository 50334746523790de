// As fp8_ue8m0_scale.cuh for warpgroup products. Probabilities are read from shared memory as they are, so that it is always
// the values that their scales multiply.
#pragma once
#include "prims/kv/fp8_ue8m0_scale.cuh"
#include "prims/kv/wgmma_scores.cuh"
#include "prims/ptx/wgmma.cuh"
#include "prims/tile/operand_image.cuh"

namespace kv {

template <class C>
struct WgmmaFp8Ue8m0Scale : Fp8Ue8m0Scale<C> {
  using Base = Fp8Ue8m0Scale<C>;
  using Image = tile::OperandImage<C::kHeads>;
  static constexpr float kProbabilityScale = 1.0f;  // the values bear 2^-60, and the output factor returns it

  // As Base::stage_query, for the image of a warpgroup's operand.
  static DSA_DEVICE void stage_query(u32 image_row, int chunk, Words4 q, float factor) {
    const int dim = 8 * chunk;
    if (dim < C::kNopeDims) {
      const int unit = dim / 16 * 2;
      ptx::store_shared_8(Image::unit(image_row, unit) + dim % 16, Base::pair(f16_query(q.x, factor), f16_query(q.z, factor)));
      ptx::store_shared_8(Image::unit(image_row, unit + 1) + dim % 16, Base::pair(f16_query(q.y, factor), f16_query(q.w, factor)));
    } else {
      const auto scaled = [&](u32 w) {
        return ptx::pack_bf16(ptx::float_of(w << 16) * factor, ptx::float_of(w & 0xffff0000u) * factor);
      };
      ptx::store_shared_16(Image::unit(image_row, chunk), Words4{scaled(q.x), scaled(q.y), scaled(q.z), scaled(q.w)});
    }
  }

  // A warp's 16 tokens, a unit per scale group.
  struct Keys {
    static constexpr int kUnits = Base::kGroups, kSteps = Base::kGroupDims / 16, kJoined = 1;
    static constexpr int kDepth = kSteps < 4 ? 3 : 2;  // narrow groups have few steps each: more of them on their way
    u32 key, scales;

    DSA_DEVICE Keys(u32 rows, int lane)
        : key(rows + (lane % 16) * C::kRowPitchBytes + (lane / 16) * 16),
          scales(rows + (lane / 4) * C::kRowPitchBytes + C::kScaleOffsetBytes) {}

    DSA_DEVICE void load(u32 (&a)[kSteps][4], int group) const {
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        const Words4 w = ptx::load_matrix_x4(key + group * Base::kGroupDims + 32 * pair);
        key_pairs(w.x, a[2 * pair][0], a[2 * pair][2]);
        key_pairs(w.y, a[2 * pair][1], a[2 * pair][3]);
        key_pairs(w.z, a[2 * pair + 1][0], a[2 * pair + 1][2]);
        key_pairs(w.w, a[2 * pair + 1][1], a[2 * pair + 1][3]);
      }
    }

    template <bool kAdd, int kTiles>
    static DSA_DEVICE void multiply(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) {
      ptx::Wgmma<kAdd, kTiles>::f16(d, a, b);
    }

    template <int kTiles>
    DSA_DEVICE void add(float (&s)[kTiles][4], const float (&acc)[kTiles][4], int group) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 bytes = Base::template load_scales<1>(scales + 8 * half * C::kRowPitchBytes + group);
        const float factor = Base::power_of(bytes, 0) * kKeyScale;
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) s[j][2 * half + e] = acc[j][2 * half + e] * factor + s[j][2 * half + e];
      }
    }
  };

  // s[j] = scores of the warp's 16 tokens, rows at `rows`, against head tile j of the query image. The four warps of a
  // warpgroup call together, each for its own tokens.
  template <int kTiles>
  static DSA_DEVICE void score(float (&s)[kTiles][4], u32 rows, u64 query, int lane) {
    scaled_scores<C, Image, Keys>(s, rows, query, lane);
  }

  template <int kTiles>
  static DSA_DEVICE void add_values(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) {
    ptx::Wgmma<true, kTiles>::bf16(d, a, b);
  }

  // Values of 16 tokens at `rows` for the kDims dims from `dim`, times 2^-60. Row r of block i is dim 16 i + 2 r, row r + 8
  // the next.
  template <int kDims, int kHeadTiles>
  struct Values {
    using Unscaled = typename Base::template Values<kDims, kHeadTiles>;
    const Unscaled codes;

    DSA_DEVICE Values(u32 rows, int dim, int lane) : codes(rows, dim, lane) {}

    DSA_DEVICE void load(u32 (&a)[Base::kBlocksPerLoad][4], int block) const {
      const Words4 w = ptx::load_matrix_x4_trans(codes.row + 16 * block);
      value_pairs(w.x, a[0][0], a[0][1]);
      value_pairs(w.y, a[0][2], a[0][3]);
      value_pairs(w.z, a[1][0], a[1][1]);
      value_pairs(w.w, a[1][2], a[1][3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 bytes = codes.scale[i / 2] >> 8 * (16 * block / Base::kGroupDims) & 0x00ff00ffu;
        const u32 factor = (bytes + 0x003c003cu) << 7;  // 60 more: codes enter as 2^-120 of themselves
        a[0][i] = ptx::mul_bf16x2(a[0][i], factor), a[1][i] = ptx::mul_bf16x2(a[1][i], factor);
      }
    }
  };

  // The same of rotary dims, which are plain; row r of a block is its dim r.
  template <int kDims, int kHeadTiles>
  struct PlainValues {
    u32 column;
    int lane;

    DSA_DEVICE PlainValues(u32 rows, int dim, int lane_)
        : column(rows + C::kRopeOffsetBytes + 2 * (dim - C::kNopeDims)), lane(lane_) {}

    DSA_DEVICE void load(u32 (&a)[Base::kBlocksPerLoad][4], int block) const {
#pragma unroll
      for (int b = 0; b < Base::kBlocksPerLoad; ++b) {
        plain_value_block<C::kRowPitchBytes>(a[b], column + 32 * (block + b), lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[b][i] = ptx::mul_bf16x2(a[b][i], 0x21802180u);
      }
    }
  };
};

}  // namespace kv
