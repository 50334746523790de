// The scale of a group from its largest magnitude, and a value in units of it: each step rounds as the declared rule says.
#pragma once
#include "prims/kv/codes.cuh"
#include "prims/ptx/arithmetic.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/types.cuh"

namespace kv_cache {

enum Rounding { kRoundNone = 0, kRoundPow2 = 1, kRoundE4m3 = 2 };

template <class C>
struct Rule {
  float scale, inverse;

  // `amax` as bits. A NaN, and where a scale has no bound an infinity, makes the whole group NaN.
  static DSA_DEVICE Rule of(u32 amax) {
    if (C::kRounding != kRoundE4m3 && amax >= kv::kInfinity) return {ptx::float_of(kv::kNan), ptx::float_of(kv::kNan)};
    float t = at_least(ptx::float_of(amax), C::kAmaxFloor);
    t = C::kMultiplies ? ptx::mul_rn(t, C::kInverseOfMost) : ptx::div_rn(t, C::kMost);
    t = at_least(t, C::kScaleFloor);
    if constexpr (C::kRounding == kRoundPow2) {
      const u32 exponent = ((ptx::bits_of(t) - 1) >> 23) + 1;
      return {ptx::float_of(exponent << 23), ptx::float_of((254 - exponent) << 23)};
    }
    if constexpr (C::kRounding == kRoundE4m3) t = kv::float_of_e4m3(kv::e4m3_code(t));  // saturates
    return {t, C::kByReciprocal ? ptx::div_rn(1.0f, t) : 0.0f};
  }

  // The inverse of a power of two is exact, so that the product is the quotient.
  DSA_DEVICE float units(float x) const {
    return C::kRounding == kRoundPow2 || C::kByReciprocal ? ptx::mul_rn(x, inverse) : ptx::div_rn(x, scale);
  }

 private:
  static DSA_DEVICE float at_least(float x, float floor) { return x < floor ? floor : x; }
};

// A format without scales.
template <class C>
struct NoRule {};

}  // namespace kv_cache
