// Global and shared memory accesses, asynchronous copies, matrix loads.
#pragma once
#include "prims/types.cuh"

struct alignas(16) Words4 {
  u32 x, y, z, w;
};

struct alignas(8) Words2 {
  u32 x, y;
};

namespace ptx {

DSA_DEVICE u32 shared_address(const void* pointer, int line = __builtin_LINE()) { return host::shared_address(pointer, line); }

DSA_DEVICE void copy_async_16(u32 shared_dst, const void* global_src, u32 bytes, int line = __builtin_LINE()) {
  host::copy_async(shared_dst, global_src, bytes, line);
}

DSA_DEVICE Words4 load_matrices(host::Op op, u32 shared_row, int line) {
  host::Exchange& x = host::exchange();
  x.in[0] = shared_row;
  host::collective(op, line);
  return {x.out[0], x.out[1], x.out[2], x.out[3]};
}

DSA_DEVICE Words4 load_matrix_x4(u32 shared_row, int line = __builtin_LINE()) {
  return load_matrices(host::Op::kLoadMatrixX4, shared_row, line);
}

DSA_DEVICE Words4 load_matrix_x4_trans(u32 shared_row, int line = __builtin_LINE()) {
  return load_matrices(host::Op::kLoadMatrixX4Trans, shared_row, line);
}

DSA_DEVICE void load_matrix_x2_trans(u32& a, u32& b, u32 shared_row, int line = __builtin_LINE()) {
  const Words4 w = load_matrices(host::Op::kLoadMatrixX2Trans, shared_row, line);
  a = w.x, b = w.y;
}

DSA_DEVICE Words4 load_shared_16(u32 address, int line = __builtin_LINE()) {
  Words4 w;
  host::load_shared(address, &w, 16, "load_shared_16", line);
  return w;
}

DSA_DEVICE Words2 load_shared_8(u32 address, int line = __builtin_LINE()) {
  Words2 w;
  host::load_shared(address, &w, 8, "load_shared_8", line);
  return w;
}

DSA_DEVICE u32 load_shared_4(u32 address, int line = __builtin_LINE()) {
  u32 x;
  host::load_shared(address, &x, 4, "load_shared_4", line);
  return x;
}

DSA_DEVICE void store_shared_16(u32 address, Words4 w, int line = __builtin_LINE()) {
  host::store_shared(address, &w, 16, "store_shared_16", line);
}

DSA_DEVICE void store_shared_8(u32 address, u64 x, int line = __builtin_LINE()) {
  host::store_shared(address, &x, 8, "store_shared_8", line);
}

DSA_DEVICE void store_shared_4(u32 address, u32 x, int line = __builtin_LINE()) {
  host::store_shared(address, &x, 4, "store_shared_4", line);
}

DSA_DEVICE Words4 load_global_16(const void* address, int line = __builtin_LINE()) {
  Words4 w;
  host::load_global(address, &w, 16, "load_global_16", line);
  return w;
}

DSA_DEVICE Words4 load_global_16_if(bool wanted, const void* address, int line = __builtin_LINE()) {
  Words4 w{};
  if (wanted) host::load_global(address, &w, 16, "load_global_16_if", line);
  return w;
}

}  // namespace ptx
