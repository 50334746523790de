// Operations on pairs of 16-bit floats and on the bytes of words. sm_80+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// Products of both halves, rounded to nearest even; subnormals are kept.
DSA_DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The same of bf16. Before sm_90 there is only the fused form: -0 added changes nothing.
DSA_DEVICE u32 mul_bf16x2(u32 a, u32 b) {
  u32 out;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return out;
}

// Four of the eight bytes of low (0..3) and high (4..7), named by the low nibbles of the selector's four digits.
DSA_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

}  // namespace ptx
