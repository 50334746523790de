// Codes of keys and of q as operands of a 16-bit product, four dims at a time: f16 where a scale is for all of a key, bf16 with
// the scale of their block of 32 dims in them otherwise. Either is exact, as far as the exponent of a bf16 reaches.
#pragma once
#include "prims/kv/e4m3_halves.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mma.cuh"
#include "prims/ptx/narrow.cuh"
#include "prims/ptx/packed.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// The power of two that one of the four ue8m0 of a word stands for, as bf16, twice: 2^-127 for 0, NaN for 255.
DSA_DEVICE u32 power_pair(u32 word, int block) {
  const u32 byte = word >> 8 * block & 0xff;
  return (byte == 0 ? 0x0040u : byte == 255 ? 0x7fc0u : byte << 7) * 0x10001u;
}

// e4m3; the fp32 scale of a key multiplies its score.
struct Fp8Codes {
  static constexpr int kBits = 8;
  static constexpr bool kBlockScales = false;
  static constexpr float kScoreFactor = kv::E4m3Halves::kCodeScale * kv::E4m3Halves::kCodeScale;
  struct Factor {};

  static DSA_DEVICE Factor factor(u32, int) { return {}; }
  static DSA_DEVICE void quad(u32 codes, Factor, u32& low, u32& high) { kv::E4m3Halves::pairs(codes, low, high); }
  static DSA_DEVICE void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_f16(d, a[0], a[1], a[2], a[3], b0, b1);
  }
};

// e4m3 with a ue8m0 for 32 dims.
struct Mxfp8Codes {
  static constexpr int kBits = 8;
  static constexpr bool kBlockScales = true;
  using Factor = u32;

  // Of a block, by the word of scales.
  static DSA_DEVICE Factor factor(u32 word, int block) { return power_pair(word, block); }
  static DSA_DEVICE void quad(u32 codes, Factor factor, u32& low, u32& high) {
    kv::E4m3Halves::pairs(codes, low, high);
    low = scaled(low, factor), high = scaled(high, factor);
  }
  static DSA_DEVICE void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_bf16(d, a[0], a[1], a[2], a[3], b0, b1);
  }

 private:
  static DSA_DEVICE u32 scaled(u32 halves, Factor factor) {
    constexpr float kScale = kv::E4m3Halves::kCodeScale;
    return ptx::mul_bf16x2(ptx::pack_bf16(ptx::float_of_f16(halves) * kScale, ptx::float_of_f16(halves >> 16) * kScale), factor);
  }
};

// e2m1, even dims in the low half of a byte, with a ue8m0 for 32 dims.
struct Mxfp4Codes {
  static constexpr int kBits = 4;
  static constexpr bool kBlockScales = true;
  using Factor = u32;

  static DSA_DEVICE Factor factor(u32 word, int block) { return power_pair(word, block); }
  // Codes in the low half of the word.
  static DSA_DEVICE void quad(u32 codes, Factor factor, u32& low, u32& high) {
    low = of_tops((codes | codes << 12) << 12, factor), high = of_tops((codes >> 8 | codes << 4) << 12, factor);
  }
  // Two codes, in the upper four bits of either half.
  static DSA_DEVICE u32 of_tops(u32 halves, Factor factor) {
    // Moved into bf16's fields they are 2^-126 of their values, subnormal ones too.
    const u32 moved = (halves & 0x80008000u) | (halves >> 6 & 0x01c001c0u);
    return ptx::mul_bf16x2(ptx::mul_bf16x2(moved, 0x7e807e80u), factor);
  }
  static DSA_DEVICE void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_bf16(d, a[0], a[1], a[2], a[3], b0, b1);
  }
};

}  // namespace indexer_logits
