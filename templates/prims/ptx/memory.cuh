// Global and shared memory accesses, asynchronous copies, matrix loads. sm_80+.
#pragma once
#include "prims/types.cuh"

struct alignas(16) Words4 {
  u32 x, y, z, w;
};

namespace ptx {

// 32-bit address of a shared-memory object, as the instructions below take it.
DSA_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// 16 bytes global -> shared, asynchronous. `bytes` is 16, or 0 to write zeros: the source is then not read,
// but must still be a legal address. Both addresses are multiples of 16.
DSA_DEVICE void copy_async_16(u32 shared_dst, const void* global_src, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_dst), "l"(global_src), "r"(bytes) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8. Register i of lane l holds
// elements 2(l%4), 2(l%4)+1 of row l/4 of matrix i.
DSA_DEVICE Words4 load_matrix_x4(u32 shared_row) {
  Words4 w;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(shared_row)
               : "memory");
  return w;
}

// As load_matrix_x4, each matrix transposed: lane l holds rows 2(l%4), 2(l%4)+1 of column l/4.
DSA_DEVICE Words4 load_matrix_x4_trans(u32 shared_row) {
  Words4 w;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(shared_row)
               : "memory");
  return w;
}

// Two transposed matrices; lanes 0..15 give the addresses.
DSA_DEVICE void load_matrix_x2_trans(u32& a, u32& b, u32 shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(shared_row) : "memory");
}

DSA_DEVICE Words4 load_shared_16(u32 address) {
  Words4 w;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(address)
               : "memory");
  return w;
}

DSA_DEVICE u32 load_shared_4(u32 address) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

DSA_DEVICE void store_shared_16(u32 address, Words4 w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}

DSA_DEVICE void store_shared_8(u32 address, u64 x) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}

DSA_DEVICE void store_shared_4(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

DSA_DEVICE Words4 load_global_16(const void* address) {
  Words4 w;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(address) : "memory");
  return w;
}

// Zeros, and no access, where `wanted` is false.
DSA_DEVICE Words4 load_global_16_if(bool wanted, const void* address) {
  Words4 w;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(w.x), "=&r"(w.y), "=&r"(w.z), "=&r"(w.w)
      : "l"(address), "r"(static_cast<u32>(wanted))
      : "memory");
  return w;
}

}  // namespace ptx
