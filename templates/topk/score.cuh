// Scores as unsigned keys whose order is that of the scores: NaN is lowest, then -inf; -0 equals +0. No score has key 0.
#pragma once
#include "prims/ptx/canonical.cuh"
#include "prims/types.cuh"

namespace topk {

// What all keys are shifted by, so that NaN, which the bits' order has on top, comes round to the bottom.
constexpr u32 kKeyShift = 0x00200000u;
constexpr u32 kKeyOfNegInf = 0x007fffffu + kKeyShift;

// The key before it is shifted.
DSA_DEVICE u32 ordered_bits(u32 fp32_bits) {
  const u32 bits = ptx::canonical_bits(fp32_bits);
  return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
}
DSA_DEVICE u32 ordered_key(u32 fp32_bits) { return ordered_bits(fp32_bits) + kKeyShift; }

// The bits of a number b such that exactly numbers above b have this key or a higher one; for keys above -inf's.
DSA_DEVICE u32 number_below_key(u32 key) {
  const u32 ordered = key - kKeyShift - 1;
  const u32 bits = (ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u : ~ordered;
  return bits == 0x80000000u ? 0x80000001u : bits;  // zeros of both signs are above the largest negative number
}

// Where an 11-bit first digit may be counted: the shift adds one to it, so counts by the unshifted digit are the same but
// for a rotation.
template <int kDigitBits>
constexpr bool kShiftIsOneDigit = kKeyShift == 1u << (32 - kDigitBits);

struct Fp32Score {
  using Word = u32;
  static constexpr int kKeyBits = 32, kPerWord = 1;
  static constexpr bool kIsNumber = true;
  static constexpr u32 kLowestWord = 0x7fffffffu;  // a word of scores that nothing is below
  // Score e of a 4-byte word, as fp32 bits.
  static DSA_DEVICE u32 bits(u32 word, int) { return word; }
  static DSA_DEVICE u32 key(u32 bits) { return ordered_key(bits); }
  static DSA_DEVICE u32 unshifted(u32 bits) { return ordered_bits(bits); }
};

// A bf16 is the upper half of an fp32.
struct Bf16Score {
  using Word = u16;
  static constexpr int kKeyBits = 16, kPerWord = 2;
  static constexpr bool kIsNumber = true;
  static constexpr u32 kLowestWord = 0x7fff7fffu;
  static DSA_DEVICE u32 bits(u32 word, int e) { return e == 0 ? word << 16 : word & 0xffff0000u; }
  static DSA_DEVICE u32 key(u32 bits) { return ordered_key(bits) >> 16; }
  static DSA_DEVICE u32 unshifted(u32 bits) { return ordered_bits(bits); }
};

}  // namespace topk
