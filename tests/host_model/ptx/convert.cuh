// Bit casts, rounding conversions and transcendental functions. The approximate ones are exact here up to one rounding;
// where they flush, they flush here too.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// Whatever fp32 arithmetic makes of NaN is this one on a device; here its sign would be an operand's, or set.
DSA_DEVICE u32 bits_of(float x) {
  if (x != x) return 0x7fffffff;
  u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

DSA_DEVICE float float_of(u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

DSA_DEVICE u32 count_ones(u32 x) { return static_cast<u32>(__builtin_popcount(x)); }

DSA_DEVICE float exp2_approx(float x) {
  const double y = __builtin_exp2(static_cast<double>(x));
  return y < 0x1p-126 ? 0.0f : static_cast<float>(y);
}

DSA_DEVICE float log2_approx(float x) { return static_cast<float>(__builtin_log2(static_cast<double>(x))); }

DSA_DEVICE u32 round_bf16(float x) {
  if (x != x) return 0x7fff;
  const u32 bits = bits_of(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

DSA_DEVICE u32 round_f16(float x) {
  if (x != x) return 0x7fff;
  const _Float16 half = static_cast<_Float16>(x);
  u16 bits;
  __builtin_memcpy(&bits, &half, 2);
  return bits;
}

DSA_DEVICE u32 pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
DSA_DEVICE u32 pack_f16(float low, float high) { return round_f16(low) | round_f16(high) << 16; }

#if __CUDA_ARCH__ >= 890
DSA_DEVICE u32 half_of_e4m3(u32 code) {
  const u32 sign = (code & 0x80) << 8, exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return 0x7fff;
  if (exponent != 0) return sign | (exponent + 8) << 10 | mantissa << 7;
  return sign | round_f16(static_cast<float>(mantissa) * 0x1p-9f);
}

DSA_DEVICE void e4m3_to_f16(u32 w, u32& low, u32& high) {
  low = half_of_e4m3(w & 0xff) | half_of_e4m3(w >> 8 & 0xff) << 16;
  high = half_of_e4m3(w >> 16 & 0xff) | half_of_e4m3(w >> 24) << 16;
}
#endif

}  // namespace ptx
