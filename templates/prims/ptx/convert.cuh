// Bit casts, rounding conversions and fast transcendental functions. sm_80+ unless a function says otherwise.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DSA_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

DSA_DEVICE u32 count_ones(u32 x) { return static_cast<u32>(__popc(x)); }

// 2^x, about 2 ulp; results under 2^-126 are flushed to zero.
DSA_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DSA_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two fp32 -> packed bf16x2, round to nearest even; `low` in bits 0..15.
DSA_DEVICE u32 pack_bf16(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// Two fp32 -> packed f16x2, round to nearest even; overflow gives infinity.
DSA_DEVICE u32 pack_f16(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

#if __CUDA_ARCH__ >= 890
// sm_89+: the four e4m3 bytes of w -> f16 pairs (byte 0, byte 1) and (byte 2, byte 3). Exact; NaN stays NaN.
DSA_DEVICE void e4m3_to_f16(u32 w, u32& low, u32& high) {
  asm("{\n .reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.rn.f16x2.e4m3x2 %0, lo;\n cvt.rn.f16x2.e4m3x2 %1, hi;\n}"
      : "=r"(low), "=r"(high)
      : "r"(w));
}
#endif

}  // namespace ptx
