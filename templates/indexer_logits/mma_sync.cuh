// Indexer logits for every arch: mma.sync on 16-bit operands that codes become exactly.
//
//   scores[t, j] = scale_j * sum_h w[t, h] * relu(q[t, h] . k_j)
//
// where scale_j is 1, and scales are in the operands, for keys whose blocks of dims have scales of their own.
//
// Keys are the M of the product, 16 kBlocks of them a warp and tile, held as registers for all tokens of a unit; heads are
// its N, 8 at a time, from an image of q in shared memory. So a key is read and converted once for the tokens of a unit, and
// the heads and tokens of a call are loops.
//
//   time ->  warp   | copies of tiles i .. i + S - 1 | wait i | tile i to registers | copies of tile i + S | products, store i | ..
//            block  | q image of the unit | meet | tiles of the unit, dealt to the warps in turn | meet | next unit's image ..
//
// A warp's tiles pass through a ring of kStages that no other warp touches: its lanes wait for their own copies and meet in
// warp_sync. The blocks of the grid take equal spans of the tiles of all units; none looks at what another does.
#pragma once
#include "indexer_logits/codes.cuh"
#include "indexer_logits/key_places.cuh"
#include "indexer_logits/key_ring.cuh"
#include "indexer_logits/query_image.cuh"
#include "indexer_logits/store.cuh"
#include "indexer_logits/work.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/max_nan.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"

namespace indexer_logits {

template <class C, class S, class Codes, class Score, class Places, class Params>
struct MmaSync {
  static constexpr int kThreads = 32 * C::kWarps, kDim = C::kDim;
  static constexpr int kSteps = kDim / 16;  // of k 16
  using Unit = typename Places::Unit;
  using Image = QueryImage<C, S, Codes, Unit, Params>;
  using Ring = KeyRing<C, S, Codes, Places, Params>;

  static DSA_DEVICE void run(const Params& p, S& shared) {
    if constexpr (Unit::kFills)
      if (p.fills != 0) fill_outside<Score, Unit>(p, kThreads);
    if constexpr (Score::kOfBlocks) count_blocks<Unit>(p, kThreads);
    Span<C, S, Params, Unit> span(p, shared);
    const int lane = ptx::thread_index() % 32, warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / 32, 0));
    Ring ring(p, shared, warp, lane);
//% if parts.counts
    Counts counts(ptx::shared_address(&shared.counts[0][0]), p.unit_tokens);
//% endif
#pragma unroll 1
    for (bool first = true; span.tiles != 0; span.advance(), first = false) {
      const Unit unit(p, span.unit);
      const u32 base = unit.first_key(p);
      ring.start(unit, span.first_tile, span.tiles);
      if (!first) ptx::block_sync();  // all warps are done with the image
//% if parts.counts
      counts.take(p, unit);
//% endif
      Image::stage(p, shared, unit);
      ptx::block_sync();
#pragma unroll 1
      for (u32 tile = warp; tile < span.tiles; tile += C::kWarps) {
        u32 a[C::kBlocks][kSteps][4];
        TileKeys<C> keys;
        ring.take(a, keys);
        score_tile(p, shared, unit, base + (span.first_tile + tile) * C::kTileKeys, a, keys, lane);
      }
    }
//% if parts.counts
    counts.finish(p);
//% endif
  }

 private:
//% if parts.counts
  using Counts = ScoreCounts<C, static_cast<int>(sizeof(u32) << C::kDigitBits)>;

//% endif
  static DSA_DEVICE void score_tile(const Params& p, S& shared, const Unit& unit, u32 first_key,
                                    const u32 (&a)[C::kBlocks][kSteps][4], const TileKeys<C>& keys, int lane) {
    const u32 rows = ptx::shared_address(&shared.query[0][0]) + (lane % 8) * C::kQueryPitchBytes + (lane / 8) * 16;
    const u32 weights = ptx::shared_address(&shared.weights[0]) + (lane % 4) * 8;
    int head_tiles = p.heads / 8;
    if constexpr (Places::kSparse) head_tiles = keys.any() ? head_tiles : 0;
#pragma unroll 1
    for (int token = 0; token < unit.tokens; ++token) {
      const Window window = unit.window(p, token);
      if (window.end <= first_key || window.begin >= first_key + C::kTileKeys) continue;
      float sums[2 * C::kBlocks] = {};
      u32 row = rows + token * p.heads * C::kQueryPitchBytes, weight = weights + token * p.heads * 4;
      Words4 b[kSteps / 2];
      load_heads(b, row);
#pragma unroll 1
      for (int tile = head_tiles; tile > 0; --tile) {
        float acc[C::kBlocks][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
          for (int m = 0; m < C::kBlocks; ++m) {
            const Words4& w = b[step / 2];
            Codes::product(acc[m], a[m][step], step % 2 == 0 ? w.x : w.z, step % 2 == 0 ? w.y : w.w);
          }
        const float w0 = ptx::float_of(ptx::load_shared_4(weight)), w1 = ptx::float_of(ptx::load_shared_4(weight + 4));
        row += 8 * C::kQueryPitchBytes, weight += 32;
        if (tile > 1) load_heads(b, row);
#pragma unroll
        for (int m = 0; m < C::kBlocks; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& sum = sums[2 * m + half];
            sum = w0 * ptx::max_nan(acc[m][2 * half], 0.0f) + sum;
            sum = w1 * ptx::max_nan(acc[m][2 * half + 1], 0.0f) + sum;
          }
      }
//% if parts.counts
      const u32 counts = ptx::shared_address(&shared.counts[token][0]);
      store_scores<C, Score>(p, unit.row(p, token), first_key, window, Unit::origin(p, window), counts, sums, keys, lane);
//% else
      store_scores<C, Score>(p, unit.row(p, token), first_key, window, Unit::origin(p, window), sums, keys, lane);
//% endif
    }
  }

  static DSA_DEVICE void load_heads(Words4 (&b)[kSteps / 2], u32 row) {
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) b[i] = ptx::load_matrix_x4(row + i * 64);
  }
};

}  // namespace indexer_logits
