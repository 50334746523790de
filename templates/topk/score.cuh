// Scores as unsigned keys whose order is that of the scores: -0 equals +0, every NaN is 0 and nothing else is, unless
// what does not exceed -inf is dropped: then -inf is 0 as well.
#pragma once
#include "prims/types.cuh"

namespace topk {

// Selections, no branches: every element of every sweep comes here.
DSA_DEVICE u32 ordered_key(u32 fp32_bits, bool drops_neg_inf) {
  const u32 flipped = fp32_bits ^ (static_cast<u32>(static_cast<i32>(fp32_bits) >> 31) | 0x80000000u);
  const u32 key = fp32_bits == 0x80000000u ? 0x80000000u : flipped;
  const bool lowest = (fp32_bits & 0x7fffffffu) > 0x7f800000u | (drops_neg_inf & (fp32_bits == 0xff800000u));
  return lowest ? 0 : key;
}

struct Fp32Score {
  using Word = u32;
  static constexpr int kKeyBits = 32;
  static DSA_DEVICE u32 key(u32 bits, bool drops_neg_inf) { return ordered_key(bits, drops_neg_inf); }
};

// A bf16 is the upper half of an fp32.
struct Bf16Score {
  using Word = u16;
  static constexpr int kKeyBits = 16;
  static DSA_DEVICE u32 key(u32 bits, bool drops_neg_inf) { return ordered_key(bits << 16, drops_neg_inf) >> 16; }
};

}  // namespace topk
