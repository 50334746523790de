// Warp matrix multiply-accumulate m16n8k16, fp32 accumulators. sm_80+.
// Lane l, r = l/4, c = l%4. A: a0 (row r, k 2c..), a1 (row r+8, k 2c..), a2 (row r, k 2c+8..), a3 (row r+8, k 2c+8..).
// B: b0 (k 2c.., col r), b1 (k 2c+8.., col r). D: d[0..1] (row r, cols 2c, 2c+1), d[2..3] (row r+8, same cols).
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DSA_DEVICE void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace ptx
