// Thread coordinates, warp votes and shuffles, barriers.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE int thread_index() { return host::thread_index(); }
DSA_DEVICE u32 block_index() { return host::block_index(); }

DSA_DEVICE u32 exchange_two(host::Op op, u32 value, u32 operand, int line) {
  host::Exchange& x = host::exchange();
  x.in[0] = value, x.in[1] = operand;
  host::collective(op, line);
  return x.out[0];
}

DSA_DEVICE u32 shuffle(u32 value, int src, int line = __builtin_LINE()) {
  return exchange_two(host::Op::kShuffle, value, static_cast<u32>(src), line);
}

DSA_DEVICE u32 shuffle_xor(u32 value, int mask, int line = __builtin_LINE()) {
  return exchange_two(host::Op::kShuffleXor, value, static_cast<u32>(mask), line);
}

DSA_DEVICE u32 ballot(bool flag, int line = __builtin_LINE()) { return exchange_two(host::Op::kBallot, flag, 0, line); }

DSA_DEVICE void warp_sync(int line = __builtin_LINE()) { host::collective(host::Op::kWarpSync, line); }

DSA_DEVICE void barrier_sync(int id, int threads, int line = __builtin_LINE()) { host::barrier(id, threads, false, false, line); }

DSA_DEVICE bool barrier_any(int id, int threads, bool flag, int line = __builtin_LINE()) {
  return host::barrier(id, threads, true, flag, line);
}

DSA_DEVICE void grid_dependency_launch() {}  // grids run one after the other here

DSA_DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  host::dependency_wait();
#endif
}

}  // namespace ptx
