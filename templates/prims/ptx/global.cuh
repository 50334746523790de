// Loads and stores of global memory narrower than 16 B, and stores of 16 B. Addresses are multiples of the size. sm_80+.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE u32 load_global_1(const void* address) {
  u32 x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

DSA_DEVICE u32 load_global_4(const void* address) {
  u32 x;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}

DSA_DEVICE u64 load_global_8(const void* address) {
  u64 x;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(x) : "l"(address) : "memory");
  return x;
}

DSA_DEVICE void store_global_1(void* address, u32 x) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

DSA_DEVICE void store_global_4(void* address, u32 x) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

DSA_DEVICE void store_global_8(void* address, u64 x) {
  asm volatile("st.global.b64 [%0], %1;" ::"l"(address), "l"(x) : "memory");
}

DSA_DEVICE void store_global_16(void* address, Words4 w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}

}  // namespace ptx
