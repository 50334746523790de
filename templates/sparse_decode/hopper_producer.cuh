// The warps of the Hopper body that fetch cache rows: teams of them take the stages of the ring in turn, a share of its rows each.
#pragma once
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/rows.cuh"
#include "sparse_decode/source.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Shared, class RowCopy, class ExtraRowCopy, class Params>
struct HopperProducer {
  static constexpr bool kTwoSources = C::kSources == 2;
  static constexpr int kTeams = C::kProducers / C::kStageShares;

  const Params& p;
  Shared& shared;
  const Work<C, Params>& work;
  const int index, lane;  // which producer
  const tile::RowPool pool;
  const i32 *indices, *extra_indices;
  const int stages;
  i32 next_id;  // of the team's next stage: a load takes less time than the copies of a stage do to be issued

  // Asks for the first ids.
  DSA_DEVICE HopperProducer(const Params& params, Shared& storage, const Work<C, Params>& item, int index_, int lane_)
      : p(params), shared(storage), work(item), index(index_), lane(lane_), pool(Source<false>::pool(params)),
        indices(Source<false>::indices(params, item.batch(params), item.token(params))), extra_indices(nullptr),
        stages(item.tiles * Work<C, Params>::kTileStages) {
    if constexpr (kTwoSources) extra_indices = Source<true>::indices(p, work.batch(p), work.token(p));
    next_id = load_id(index / C::kStageShares);
  }

  // The barriers of the ring are initialised.
  DSA_DEVICE void run() {
    int slot = index / C::kStageShares;
    u32 parity = 1;  // of the round before: the phase before the first counts as complete
    // Not unrolled: code that runs for the first time comes from DRAM, which takes as long as the rows do.
#pragma unroll 1
    for (int n = slot; n < stages; n += kTeams) {
      const i32 id = next_id;
      next_id = load_id(n + kTeams);
      ptx::mbarrier_wait(ptx::shared_address(&shared.freed[slot]), parity);
      fill_from_source(n, slot, id);
      advance_ring<C::kStages>(slot, parity, kTeams);
    }
  }

 private:
  // Id of this lane's row in the n-th stage, -1 where there is none.
  DSA_DEVICE i32 load_id(int n) const {
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

  DSA_DEVICE void fill_from_source(int n, int slot, i32 id) {
    if constexpr (kTwoSources) {
      if (n >= work.main_tiles * Work<C, Params>::kTileStages) {
        fill<true, ExtraRowCopy>(Source<true>::pool(p), slot, id);
        return;
      }
    }
    fill<false, RowCopy>(pool, slot, id);
  }

  template <bool kExtra, class Copy>
  DSA_DEVICE void fill(const tile::RowPool& from, int slot, i32 id) {
    const bool valid = from.holds(id);
    const u32 mask = ptx::ballot(valid);
    // Consumers skip stages without a valid row; other invalid rows must be zeros.
    const u32 wanted = mask != 0 ? 0xffffffffu : 0;
    const int share = index % C::kStageShares;
    if (share == 0 && lane == 0) shared.valid[slot] = mask;
    u64 part = 0;
    if constexpr (C::kPartBytes > 0) {
      const tile::RowPool parts = Source<kExtra>::part_pool(p);
      part = valid ? parts.address(id) : reinterpret_cast<u64>(parts.base);
    }
    Copy::start(ptx::shared_address(&shared.rows[slot][0][0]), valid ? from.address(id) : reinterpret_cast<u64>(from.base), part,
                mask, wanted, ptx::shared_address(&shared.landed[slot]), ptx::shared_address(&shared.addresses[index][0]), share,
                lane);
  }
};

}  // namespace sparse_decode
