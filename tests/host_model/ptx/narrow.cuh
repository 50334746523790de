// Conversions of narrow types, by value rather than by bits: the nearest of all codes, the even one of two.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE float float_of_f16(u32 bits) {
  const u16 half = static_cast<u16>(bits);
  _Float16 x;
  __builtin_memcpy(&x, &half, 2);
  return static_cast<float>(x);
}

#if __CUDA_ARCH__ >= 890
DSA_DEVICE u32 nearest_e4m3(float x) {
  if (x != x) return 0x7f;
  const double size = __builtin_fabs(static_cast<double>(x));
  u32 best = 0;
  double nearest = size, value;
  for (u32 code = 1; code < 0x7f; ++code) {
    const int exponent = static_cast<int>(code >> 3), mantissa = static_cast<int>(code & 7);
    value = exponent == 0 ? __builtin_ldexp(mantissa, -9) : __builtin_ldexp(8 + mantissa, exponent - 10);
    const double distance = __builtin_fabs(value - size);
    if (distance < nearest || (distance == nearest && code % 2 == 0)) best = code, nearest = distance;
  }
  return best | (__builtin_signbit(x) ? 0x80u : 0u);
}

DSA_DEVICE u32 pack_e4m3(float low, float high) { return nearest_e4m3(low) | nearest_e4m3(high) << 8; }
#endif

}  // namespace ptx
