// Warp matrix multiply-accumulate m16n8k16.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void mma(host::Op op, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int line) {
  host::Exchange& x = host::exchange();
  x.in[0] = a0, x.in[1] = a1, x.in[2] = a2, x.in[3] = a3, x.in[4] = b0, x.in[5] = b1;
  for (int i = 0; i < 4; ++i) x.accumulator[i] = d[i];
  host::collective(op, line);
  for (int i = 0; i < 4; ++i) d[i] = x.accumulator[i];
}

DSA_DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int line = __builtin_LINE()) {
  mma(host::Op::kMmaF16, d, a0, a1, a2, a3, b0, b1, line);
}

DSA_DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int line = __builtin_LINE()) {
  mma(host::Op::kMmaBf16, d, a0, a1, a2, a3, b0, b1, line);
}

}  // namespace ptx
