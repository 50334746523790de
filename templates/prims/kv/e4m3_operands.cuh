// Matrix operands from raw e4m3 codes.
#pragma once
#include "prims/ptx/convert.cuh"

namespace kv {

// One word of e4m3 codes -> f16 pairs (bytes 0, 1) and (bytes 2, 3), each times 1 / kKeyScale.
#if __CUDA_ARCH__ >= 890
constexpr float kKeyScale = 1.0f;
DSA_DEVICE void key_pairs(u32 w, u32& low, u32& high) { ptx::e4m3_to_f16(w, low, high); }
#else
// No conversion instruction: an e4m3 code shifted into f16's exponent field reads 2^-8 times its value. Code 0x7f (NaN)
// reads as 480 here.
constexpr float kKeyScale = 256.0f;
DSA_DEVICE void key_pairs(u32 w, u32& low, u32& high) {
  const u32 y0 = (w & 0xffu) << 8 | (w & 0xff00u) << 16, y1 = (w & 0xff0000u) >> 8 | (w & 0xff000000u);
  low = (y0 & 0x80008000u) | ((y0 & 0x7f007f00u) >> 1);
  high = (y1 & 0x80008000u) | ((y1 & 0x7f007f00u) >> 1);
}
#endif

// Even and odd bytes of w as bf16 pairs, value x 2^-120: e4m3's exponent field lands in the low bits of bf16's.
DSA_DEVICE void value_pairs(u32 w, u32& even, u32& odd) {
  even = ((w << 8) & 0x80008000u) | ((w << 4) & 0x07f007f0u);
  odd = (w & 0x80008000u) | ((w >> 4) & 0x07f007f0u);
}

// Two bf16 q words as f16, times `factor` (a power of two).
DSA_DEVICE u32 f16_query(u32 pair, float factor) {
  return ptx::pack_f16(ptx::float_of(pair << 16) * factor, ptx::float_of(pair & 0xffff0000u) * factor);
}

}  // namespace kv
