// Loads and stores of global memory, held to the tensors that a launch was given.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/types.cuh"

namespace ptx {

template <class Word>
DSA_DEVICE Word load_word(const void* address, const char* name, int line) {
  Word x;
  host::load_global(address, &x, sizeof(Word), name, line);
  return x;
}

DSA_DEVICE u32 load_global_1(const void* address, int line = __builtin_LINE()) { return load_word<u8>(address, "load_global_1", line); }
DSA_DEVICE u32 load_global_4(const void* address, int line = __builtin_LINE()) { return load_word<u32>(address, "load_global_4", line); }
DSA_DEVICE u64 load_global_8(const void* address, int line = __builtin_LINE()) { return load_word<u64>(address, "load_global_8", line); }

template <class Word>
DSA_DEVICE void store_word(void* address, Word x, const char* name, int line) {
  host::store_global(address, &x, sizeof(Word), name, line);
}

DSA_DEVICE void store_global_1(void* address, u32 x, int line = __builtin_LINE()) { store_word(address, static_cast<u8>(x), "store_global_1", line); }
DSA_DEVICE void store_global_4(void* address, u32 x, int line = __builtin_LINE()) { store_word(address, x, "store_global_4", line); }
DSA_DEVICE void store_global_8(void* address, u64 x, int line = __builtin_LINE()) { store_word(address, x, "store_global_8", line); }
DSA_DEVICE void store_global_16(void* address, Words4 w, int line = __builtin_LINE()) { store_word(address, w, "store_global_16", line); }

}  // namespace ptx
