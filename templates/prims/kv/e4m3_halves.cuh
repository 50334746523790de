// e4m3 codes as f16 pairs, the operand of a 16-bit matrix product that is exact in every element.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/types.cuh"

namespace kv {

struct E4m3Halves {
  // The four codes of a word -> f16 pairs (bytes 0, 1) and (bytes 2, 3), each times 1 / kCodeScale.
#if __CUDA_ARCH__ >= 890
  static constexpr float kCodeScale = 1.0f;
  static DSA_DEVICE void pairs(u32 word, u32& low, u32& high) { ptx::e4m3_to_f16(word, low, high); }
#else
  // No conversion instruction: a code shifted into f16's exponent field reads 2^-8 times its value, subnormals too. Code
  // 0x7f (NaN) reads as 480 here.
  static constexpr float kCodeScale = 256.0f;
  static DSA_DEVICE void pairs(u32 word, u32& low, u32& high) {
    const u32 y0 = (word & 0xffu) << 8 | (word & 0xff00u) << 16, y1 = (word & 0xff0000u) >> 8 | (word & 0xff000000u);
    low = (y0 & 0x80008000u) | ((y0 & 0x7f007f00u) >> 1);
    high = (y1 & 0x80008000u) | ((y1 & 0x7f007f00u) >> 1);
  }
#endif
};

}  // namespace kv
