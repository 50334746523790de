// As fp8_fp32_scale.cuh for warpgroup products: keys and values are their A operands, made in registers from the raw bytes;
// B operands are the query image and the probabilities in shared memory.
#pragma once
#include "prims/kv/fp8_fp32_scale.cuh"
#include "prims/kv/wgmma_scores.cuh"
#include "prims/ptx/load_pair.cuh"
#include "prims/ptx/wgmma.cuh"
#include "prims/tile/operand_image.cuh"

namespace kv {

template <class C>
struct WgmmaFp8Fp32Scale : Fp8Fp32Scale<C> {
  using Base = Fp8Fp32Scale<C>;
  using Image = tile::OperandImage<C::kHeads>;

  // Eight bf16 q values of dims 8 chunk.. -> query image, times `factor` (a power of two), in the order of Base::query_byte.
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
      const int byte = Base::query_byte(dim);
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::store_shared_4(Image::unit(image_row, byte / 16 + i) + byte % 16, packed[i]);
    } else {
      ptx::store_shared_16(Image::unit(image_row, chunk), Words4{packed[0], packed[1], packed[2], packed[3]});
    }
  }

  // A warp's 16 tokens. A scale group is some units, since the operands of a whole one would take half of the registers; with two
  // groups of score warps and more than 16 heads there are registers for one set of sums, and for two k steps of keys.
  struct Keys {
    static constexpr bool kFewRegisters = C::kHeads > 16;
    static constexpr int kGroups = Base::kGroups, kJoined = kFewRegisters ? 4 : 2, kDepth = kFewRegisters ? 1 : 2;
    static constexpr int kUnits = kGroups * kJoined, kSteps = Base::kGroupDims / 16 / kJoined;
    static_assert(kGroups == 4 && (kSteps == 2 || kSteps == 4) && C::kNopeDims % 16 == 0);
    u32 row;  // this lane's 32 B of group 0 in token lane / 4

    u32 scales;  // of token lane / 4

    DSA_DEVICE Keys(u32 rows, int lane)
        : row(rows + (lane / 4) * C::kRowPitchBytes + 32 * (lane % 4)),
          scales(rows + (lane / 4) * C::kRowPitchBytes + C::kNopeDims) {}

    // The lane's 32 B of a group are 8 words, one for each step.
    DSA_DEVICE void load(u32 (&a)[kSteps][4], int unit) const {
      const u32 at = row + Base::kGroupDims * (unit / kJoined) + 4 * kSteps * (unit % kJoined);
      u32 low[kSteps], high[kSteps];
      load_words(low, at);
      load_words(high, at + 8 * C::kRowPitchBytes);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        key_pairs(low[i], a[i][0], a[i][2]);
        key_pairs(high[i], a[i][1], a[i][3]);
      }
    }

    static DSA_DEVICE void load_words(u32 (&w)[kSteps], u32 at) {
      if constexpr (kSteps == 4) {
        const Words4 x = ptx::load_shared_16(at);
        w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
      } else {
        ptx::load_shared_8(w[0], w[1], at);
      }
    }

    template <bool kAdd, int kTiles>
    static DSA_DEVICE void multiply(float (&d)[kTiles][4], const u32 (&a)[4], u64 b) {
      ptx::Wgmma<kAdd, kTiles>::f16(d, a, b);
    }

    template <int kTiles>
    DSA_DEVICE void add(float (&s)[kTiles][4], const float (&acc)[kTiles][4], int group) const {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factor[half] = ptx::float_of(ptx::load_shared_4(scales + 8 * half * C::kRowPitchBytes + 4 * group)) * kKeyScale;
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = acc[j][i] * factor[i / 2] + s[j][i];
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
};

}  // namespace kv
