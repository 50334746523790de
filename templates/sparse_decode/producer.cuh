// The warps that fetch cache rows: each takes every kProducers-th stage of the ring.
#pragma once
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/rows.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Shared, class RowCopy, class Params>
struct Producer {
  const Params& p;
  Shared& shared;
  const Work<C, Params>& work;
  const int index, lane;  // which producer
  const tile::RowPool pool;

  DSA_DEVICE Producer(const Params& params, Shared& storage, const Work<C, Params>& item, int index_, int lane_)
      : p(params), shared(storage), work(item), index(index_), lane(lane_),
        pool{params.kv, params.page_stride_bytes, params.row_stride_bytes, params.pool_tokens,
             {params.page_multiplier, params.page_shift, params.page_size}} {}

  DSA_DEVICE void run() {
    const i32* indices = p.indices + work.batch(p) * p.indices_stride_b + work.token(p) * p.indices_stride_s;
    const int stages = work.tiles * Work<C, Params>::kTileStages;
    i32 next_id = load_id(indices, index);
#pragma unroll 1
    for (int n = index; n < stages; n += C::kProducers) {
      const i32 id = next_id;
      next_id = load_id(indices, n + C::kProducers);
      const int slot = n % C::kStages, round = n / C::kStages;
      if (round > 0) ptx::mbarrier_wait(ptx::shared_address(&shared.freed[slot]), (round - 1) & 1);
      fill(slot, id);
    }
  }

 private:
  // Id of this lane's row in the n-th stage, -1 where there is none.
  DSA_DEVICE i32 load_id(const i32* indices, int n) const {
    const i64 column = work.stage_column(p, n) + lane;
    return column < work.length ? indices[column] : -1;
  }

  DSA_DEVICE void fill(int slot, i32 id) {
    const bool valid = pool.holds(id);
    const u32 mask = ptx::ballot(valid);
    if (lane == 0) shared.valid[slot] = mask;
    // Consumers skip blocks of 16 rows without a valid one, or a score warp all of its blocks; other invalid rows must be zeros.
    const u32 wanted = C::kWarpBlocks == 1 ? (mask & 0xffffu ? 0xffffu : 0) | (mask & 0xffff0000u ? 0xffff0000u : 0)
                                           : (mask != 0 ? 0xffffffffu : 0);
    RowCopy::start(ptx::shared_address(&shared.rows[slot][0][0]), valid ? pool.address(id) : reinterpret_cast<u64>(p.kv),
                   mask, wanted, ptx::shared_address(&shared.landed[slot]),
                   ptx::shared_address(&shared.addresses[index][0]), lane);
  }
};

}  // namespace sparse_decode
