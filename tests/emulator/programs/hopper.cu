// What CUDA's headers make of clusters, mbarriers, and bulk and tensor copies: compiled, and not run.
#include <cooperative_groups.h>
#include <cuda/ptx>

namespace ptx = cuda::ptx;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = cuda::std::uint64_t;
using i32 = int;
using i64 = cuda::std::int64_t;

extern "C" __global__ void __cluster_dims__(2, 1, 1) clusters(u32* out) {
  __shared__ u32 word;
  auto cluster = cooperative_groups::this_cluster();
  word = threadIdx.x;
  cluster.sync();
  u32* far = cluster.map_shared_rank(&word, cluster.block_rank() ^ 1);
  atomicAdd(far, 1u);
  *far += cluster.num_blocks() + cluster.dim_blocks().x + cluster.block_index().y + cluster.dim_threads().x;
  out[0] = *far + cluster.query_shared_rank(far) + cooperative_groups::grid_group::block_rank();
  out[1] = ptx::get_sreg_clusterid_x() + ptx::get_sreg_nclusterid_y() + ptx::get_sreg_cluster_ctaid_z() +
           ptx::get_sreg_cluster_nctaid_x() + ptx::get_sreg_cluster_ctarank() + ptx::get_sreg_cluster_nctarank() +
           ptx::get_sreg_is_explicit_cluster() + ptx::getctarank(ptx::space_cluster, far) + __isShared(far);
  auto token = cluster.barrier_arrive();
  cluster.barrier_wait(cuda::std::move(token));
  ptx::barrier_cluster_arrive(ptx::sem_relaxed);
  ptx::barrier_cluster_wait(ptx::sem_acquire);
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

extern "C" __global__ void barriers(u64* out, u32 count, u32 phase) {
  __shared__ u64 bar;
  ptx::mbarrier_init(&bar, count);
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  ptx::fence_proxy_async();
  ptx::fence_proxy_async(ptx::space_global);
  ptx::fence_proxy_async(ptx::space_shared);
  ptx::fence_proxy_alias();
  u64 state = ptx::mbarrier_arrive(&bar) + ptx::mbarrier_arrive(&bar, count) +
              ptx::mbarrier_arrive_no_complete(&bar, count);
  state += ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &bar, count);
  state += ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_shared, &bar);
  state += ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &bar, count);
  state += ptx::mbarrier_arrive_expect_tx(ptx::sem_relaxed, ptx::scope_cluster, ptx::space_shared, &bar, count);
  ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, &bar);
  ptx::mbarrier_arrive(ptx::sem_relaxed, ptx::scope_cluster, ptx::space_cluster, &bar, count);
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cluster, ptx::space_cluster, &bar, count);
  ptx::mbarrier_expect_tx(ptx::sem_relaxed, ptx::scope_cta, ptx::space_shared, &bar, count);
  ptx::mbarrier_expect_tx(ptx::sem_relaxed, ptx::scope_cluster, ptx::space_cluster, &bar, count);
  bool done = ptx::mbarrier_test_wait(&bar, state) && ptx::mbarrier_test_wait_parity(&bar, phase);
  done &= ptx::mbarrier_try_wait(&bar, state) && ptx::mbarrier_try_wait(&bar, state, 100);
  done &= ptx::mbarrier_try_wait(ptx::sem_acquire, ptx::scope_cluster, &bar, state);
  done &= ptx::mbarrier_try_wait_parity(&bar, phase) && ptx::mbarrier_try_wait_parity(&bar, phase, 100);
  done &= ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cta, &bar, phase);
  done &= ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cluster, &bar, phase, 100);
  done &= ptx::mbarrier_test_wait_parity(ptx::sem_relaxed, ptx::scope_cluster, &bar, phase);
  out[0] = state + done;
}

template <class Op, class T>
__device__ void reduce_far(Op op, T* shared, u64* bar, T value, u32 size) {
  ptx::red_async(op, shared, value, bar);
  ptx::cp_reduce_async_bulk(ptx::space_cluster, ptx::space_shared, op, shared, shared, size, bar);
}

template <class Op, class T>
__device__ void reduce_global(Op op, T* to, const T* shared, u32 size) {
  ptx::cp_reduce_async_bulk(ptx::space_global, ptx::space_shared, op, to, shared, size);
}

extern "C" __global__ void copies(u32* global, u64* wide, u32 size, u16 ranks) {
  __shared__ alignas(128) u32 tile[256];
  __shared__ u64 bar;
  u64* pairs = reinterpret_cast<u64*>(tile);
  i32* words = reinterpret_cast<i32*>(tile);
  ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile, global, size, &bar);
  ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile, global, size, &bar, ranks);
  ptx::cp_async_bulk(ptx::space_cluster, ptx::space_shared, tile, tile, size, &bar);
  ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, global, tile, size);
  ptx::cp_async_bulk_commit_group();
  ptx::cp_async_bulk_wait_group(ptx::n32_t<1>());
  ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
  ptx::st_async(tile, size, &bar);
  ptx::st_async(pairs, u64{size}, &bar);
  const u32 four[4] = {size, size, size, size};
  const u64 two[2] = {size, size};
  ptx::st_async(tile, four, &bar);
  ptx::st_async(pairs, two, &bar);
  reduce_far(ptx::op_inc, tile, &bar, size, size);
  reduce_far(ptx::op_dec, tile, &bar, size, size);
  reduce_far(ptx::op_min, tile, &bar, size, size);
  reduce_far(ptx::op_max, tile, &bar, size, size);
  reduce_far(ptx::op_add, tile, &bar, size, size);
  reduce_far(ptx::op_min, words, &bar, i32(size), size);
  reduce_far(ptx::op_max, words, &bar, i32(size), size);
  reduce_far(ptx::op_add, words, &bar, i32(size), size);
  reduce_far(ptx::op_and_op, tile, &bar, size, size);
  reduce_far(ptx::op_or_op, tile, &bar, size, size);
  reduce_far(ptx::op_xor_op, tile, &bar, size, size);
  reduce_far(ptx::op_add, pairs, &bar, u64{size}, size);
  reduce_global(ptx::op_and_op, global, tile, size);
  reduce_global(ptx::op_xor_op, wide, pairs, size);
  reduce_global(ptx::op_add, global, tile, size);
  reduce_global(ptx::op_inc, global, tile, size);
  reduce_global(ptx::op_dec, global, tile, size);
  reduce_global(ptx::op_add, wide, pairs, size);
  reduce_global(ptx::op_min, reinterpret_cast<i64*>(wide), reinterpret_cast<const i64*>(pairs), size);
  reduce_global(ptx::op_add, reinterpret_cast<float*>(global), reinterpret_cast<const float*>(tile), size);
  reduce_global(ptx::op_add, reinterpret_cast<double*>(global), reinterpret_cast<const double*>(tile), size);
}

template <int N, class Op>
__device__ void reduce_tensor(Op op, const void* map, const void* tile) {
  const i32 at[N] = {};
  ptx::cp_reduce_async_bulk_tensor(ptx::space_global, ptx::space_shared, op, map, at, tile);
}

template <int N>
__device__ void move_tensor(const void* map, void* tile, u64* bar, u16 ranks) {
  const i32 at[N] = {};
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, tile, map, at, bar);
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, tile, map, at, bar, ranks);
  ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, map, at, tile);
  reduce_tensor<N>(ptx::op_add, map, tile);
  reduce_tensor<N>(ptx::op_min, map, tile);
  reduce_tensor<N>(ptx::op_inc, map, tile);
  reduce_tensor<N>(ptx::op_and_op, map, tile);
}

struct alignas(64) Map {
  u64 words[16];
};

extern "C" __global__ void tensors(const __grid_constant__ Map map, u16 ranks) {
  __shared__ alignas(128) u32 tile[256];
  __shared__ u64 bar;
  move_tensor<1>(&map, tile, &bar, ranks);
  move_tensor<2>(&map, tile, &bar, ranks);
  move_tensor<3>(&map, tile, &bar, ranks);
  move_tensor<4>(&map, tile, &bar, ranks);
  move_tensor<5>(&map, tile, &bar, ranks);
  ptx::fence_proxy_tensormap_generic(ptx::sem_release, ptx::scope_gpu);
  ptx::fence_proxy_tensormap_generic(ptx::sem_acquire, ptx::scope_gpu, &map, ptx::n32_t<128>());
}
