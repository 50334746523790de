// The warps that fetch cache rows: each takes every kProducers-th stage of the ring.
#pragma once
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/rows.cuh"
#include "sparse_decode/source.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Shared, class RowCopy, class ExtraRowCopy, class Params>
struct Producer {
  static constexpr bool kTwoSources = C::kSources == 2;

  const Params& p;
  Shared& shared;
  const Work<C, Params>& work;
  const int index, lane;  // which producer
  const tile::RowPool pool;

  DSA_DEVICE Producer(const Params& params, Shared& storage, const Work<C, Params>& item, int index_, int lane_)
      : p(params), shared(storage), work(item), index(index_), lane(lane_), pool(Source<false>::pool(params)) {}

  DSA_DEVICE void run() {
    const i32* indices = Source<false>::indices(p, work.batch(p), work.token(p));
    const i32* extra_indices = nullptr;
    if constexpr (kTwoSources) extra_indices = Source<true>::indices(p, work.batch(p), work.token(p));
    const int stages = work.tiles * Work<C, Params>::kTileStages;
    i32 next_id = load_id(indices, extra_indices, index);
#pragma unroll 1
    for (int n = index; n < stages; n += C::kProducers) {
      const i32 id = next_id;
      next_id = load_id(indices, extra_indices, n + C::kProducers);
      const int slot = n % C::kStages, round = n / C::kStages;
      if (round > 0) ptx::mbarrier_wait(ptx::shared_address(&shared.freed[slot]), (round - 1) & 1);
      if constexpr (kTwoSources) {
        if (n >= work.main_tiles * Work<C, Params>::kTileStages) {
          fill<true, ExtraRowCopy>(Source<true>::pool(p), slot, id);
          continue;
        }
      }
      fill<false, RowCopy>(pool, slot, id);
    }
  }

 private:
  // Id of this lane's row in the n-th stage, -1 where there is none.
  DSA_DEVICE i32 load_id(const i32* indices, const i32* extra_indices, int n) const {
    const i64 tile = work.stage_tile(p, n);
    if constexpr (kTwoSources) {
      if (tile >= work.main_row_tiles) {
        const i64 column = work.stage_column(tile - work.main_row_tiles, n) + lane;
        return column < work.extra_length ? extra_indices[column] : -1;
      }
    }
    const i64 column = work.stage_column(tile, n) + lane;
    return column < work.length ? indices[column] : -1;
  }

  template <bool kExtra, class Copy>
  DSA_DEVICE void fill(const tile::RowPool& from, int slot, i32 id) {
    const bool valid = from.holds(id);
    const u32 mask = ptx::ballot(valid);
    if (lane == 0) shared.valid[slot] = mask;
    // Consumers skip blocks of 16 rows without a valid one, or a score warp all of its blocks; other invalid rows must be zeros.
    const u32 wanted = C::kWarpBlocks == 1 ? (mask & 0xffffu ? 0xffffu : 0) | (mask & 0xffff0000u ? 0xffff0000u : 0)
                                           : (mask != 0 ? 0xffffffffu : 0);
    u64 part = 0;
    if constexpr (C::kPartBytes > 0) {
      const tile::RowPool parts = Source<kExtra>::part_pool(p);
      part = valid ? parts.address(id) : reinterpret_cast<u64>(parts.base);
    }
    Copy::start(ptx::shared_address(&shared.rows[slot][0][0]), valid ? from.address(id) : reinterpret_cast<u64>(from.base), part,
                mask, wanted, ptx::shared_address(&shared.landed[slot]), ptx::shared_address(&shared.addresses[index][0]), lane);
  }
};

}  // namespace sparse_decode
