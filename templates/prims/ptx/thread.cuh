// Thread coordinates, warp votes and shuffles, barriers. All: sm_80+ unless a function says otherwise.
#pragma once
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE int thread_index() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return static_cast<int>(x);
}

DSA_DEVICE u32 block_index() {
  u32 x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// Value of lane `src`; every lane of the warp calls.
DSA_DEVICE u32 shuffle(u32 value, int src) {
  u32 out;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(out) : "r"(value), "r"(src));
  return out;
}

DSA_DEVICE u32 shuffle_xor(u32 value, int mask) {
  u32 out;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(out) : "r"(value), "r"(mask));
  return out;
}

DSA_DEVICE u32 ballot(bool flag) {
  u32 out;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %1, 0;\n vote.sync.ballot.b32 %0, p, 0xffffffff;\n}"
      : "=r"(out)
      : "r"(static_cast<u32>(flag)));
  return out;
}

// Orders the shared-memory accesses of a warp's lanes.
DSA_DEVICE void warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// `threads` threads (a multiple of 32) meet at barrier `id` of the CTA; orders shared-memory accesses among them.
DSA_DEVICE void barrier_sync(int id, int threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// barrier_sync that also returns whether any of its threads passed true.
DSA_DEVICE bool barrier_any(int id, int threads, bool flag) {
  u32 out;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n barrier.red.or.pred q, %2, %3, p;\n selp.u32 %0, 1, 0, q;\n}"
      : "=r"(out)
      : "r"(static_cast<u32>(flag)), "r"(id), "r"(threads)
      : "memory");
  return out != 0;
}

// sm_90+: dependents of this grid may start being placed. They still wait for its completion in grid_dependency_wait.
DSA_DEVICE void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// sm_90+: returns once the grids this launch depends on have completed and their writes are visible.
DSA_DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ptx
