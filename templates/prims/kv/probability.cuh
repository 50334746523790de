// How probabilities and values meet in a matrix product.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mma.cuh"

namespace kv {

// As bf16, which has the range of fp32: for values with scales, and for bf16 ones.
struct Bf16Probability {
  static constexpr int kPlainValueDims = 0;  // trailing value dims that are unscaled bf16, beside quantised ones

  static DSA_DEVICE u32 pack_probabilities(float low, float high) { return ptx::pack_bf16(low, high); }

  static DSA_DEVICE void multiply_values(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_bf16(d, a[0], a[1], a[2], a[3], b0, b1);
  }
};

// As f16, for values of f16, which no other 16-bit type holds.
struct F16Probability {
  static constexpr int kPlainValueDims = 0;

  static DSA_DEVICE u32 pack_probabilities(float low, float high) { return ptx::pack_f16(low, high); }

  static DSA_DEVICE void multiply_values(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_f16(d, a[0], a[1], a[2], a[3], b0, b1);
  }
};

}  // namespace kv
