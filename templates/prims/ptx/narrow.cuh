// Conversions of narrow types that element codecs need. sm_80+ unless a function says otherwise.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// The f16 in bits 0..15. Exact.
DSA_DEVICE float float_of_f16(u32 bits) {
  float x;
  asm("{\n .reg .b16 h;\n cvt.u16.u32 h, %1;\n cvt.f32.f16 %0, h;\n}" : "=f"(x) : "r"(bits));
  return x;
}

#if __CUDA_ARCH__ >= 890
// sm_89+: two fp32 -> e4m3 codes, nearest even, what exceeds 448 saturates, NaN gives 0x7f; `low` in bits 0..7.
DSA_DEVICE u32 pack_e4m3(float low, float high) {
  u32 out;
  asm("{\n .reg .b16 h;\n cvt.rn.satfinite.e4m3x2.f32 h, %1, %2;\n cvt.u32.u16 %0, h;\n}" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
#endif

}  // namespace ptx
