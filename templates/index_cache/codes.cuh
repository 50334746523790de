// Codes of index keys, 16 dims at a time, as words in registers: pages begin where 16-byte stores may not be possible.
#pragma once
#include "prims/kv/codes.cuh"
#include "prims/ptx/arithmetic.cuh"
#include "prims/ptx/narrow.cuh"
#include "prims/types.cuh"

namespace index_cache {

struct E4m3Keys {
  static constexpr int kWords = 4;

  static DSA_DEVICE void pack(u32 (&words)[kWords], const float (&x)[kv::kPieceDims]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pair(x[4 * i], x[4 * i + 1]) | pair(x[4 * i + 2], x[4 * i + 3]) << 16;
  }

 private:
  static DSA_DEVICE u32 pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    return ptx::pack_e4m3(low, high);
#else
    return kv::e4m3_code(low) | kv::e4m3_code(high) << 8;
#endif
  }
};

// Even dims in the low half of a byte. What rounds to zero has no sign.
template <bool kTiesDown>
struct E2m1Keys {
  static constexpr int kWords = 2;

  static DSA_DEVICE void pack(u32 (&words)[kWords], const float (&x)[kv::kPieceDims]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
#pragma unroll
    for (int i = 0; i < kv::kPieceDims; ++i) words[i / 8] |= code(x[i]) << (i % 8 * 4);
  }

 private:
  static DSA_DEVICE u32 code(float x) {
    const u32 nearest = kTiesDown ? code_ties_down(x) : kv::e2m1_code(x);
    return (nearest & 7) == 0 ? 0 : nearest;
  }

  // How many of the seven middles between neighbouring numbers are passed; NaN passes none.
  static DSA_DEVICE u32 code_ties_down(float x) {
    const float size = ptx::float_of(ptx::bits_of(x) & kv::kMagnitude);
    const u32 above = (size > 0.25f) + (size > 0.75f) + (size > 1.25f) + (size > 1.75f) + (size > 2.5f) + (size > 3.5f) + (size > 5.0f);
    return above | (ptx::bits_of(x) >> 28 & 8);
  }
};

}  // namespace index_cache
