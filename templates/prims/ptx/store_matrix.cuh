// Matrix stores. sm_90+.
#pragma once
#include "prims/types.cuh"

namespace ptx {

// Two 8x8 matrices of 16-bit elements, each transposed: register i of lane l holds rows 2(l%4), 2(l%4)+1 of column l/4 of
// matrix i; lane l < 16 gives the address of row l%8 of matrix l/8.
DSA_DEVICE void store_matrix_x2_trans(u32 shared_row, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_row), "r"(a), "r"(b) : "memory");
}

// Four of them; every lane gives an address.
DSA_DEVICE void store_matrix_x4_trans(u32 shared_row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_row), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

}  // namespace ptx
