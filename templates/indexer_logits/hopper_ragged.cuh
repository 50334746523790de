// Indexer logits over keys in one piece for Hopper: warpgroup products of e4m3 codes as they come, both operands in shared
// memory.
//
//   scores[t, j] = scale_j * sum_h w[t, h] * relu(q[t, h] . k_j)
//
// A block's unit is as many neighbouring tokens as its warpgroups have columns for. Each warpgroup has tokens of its own,
// all heads of them side by side as the N of its products and their weights in registers, and multiplies 64 keys at a time,
// M, of tiles that all of them share.
//
//   time ->  block       | copies of tiles i .. i + ahead | q image of the unit | meet | tiles of the unit | meet | ..
//            groups 0, 2 | products i | sums, scores | products i + 1 | sums, scores | ..
//            groups 1, 3 |            | products i   | sums, scores   | products i + 1 | ..
//
//   landed[stage]  the copies of a group's threads arrive: a tile is there. freed[stage]  every warp arrives: it is done with a tile.
//   turns[group]   the other of a pair of groups arrives: its products are finished. Both would else multiply, and then both
//                  sum, at the same time. No data passes.
//
// The blocks of the grid take equal spans of the tiles of all units; none looks at what another does.
#pragma once
#include "indexer_logits/hopper_ragged_keys.cuh"
#include "indexer_logits/ragged_work.cuh"
#include "indexer_logits/store.cuh"
#include "indexer_logits/work.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/copy_group.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/max_nan.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/opaque.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/ptx/wgmma_e4m3_shared.cuh"

namespace indexer_logits {

// Which of a pair of warpgroups multiplies; kTakes false: both do as they come.
template <bool kTakes>
struct Turns {
  u32 mine, other, parity;

  // Group g's barrier is the g-th of those from `first` on. The even one of a pair begins.
  DSA_DEVICE Turns(u32 first, int group) : mine(first + 8 * group), other(first + 8 * (group ^ 1)), parity(~group & 1) {
    if (kTakes && ptx::thread_index() % 128 == 0) ptx::mbarrier_init(mine, 4);
  }

  DSA_DEVICE void await() {
    if constexpr (kTakes) {
      ptx::mbarrier_wait(mine, parity);
      parity ^= 1;
    }
  }

  DSA_DEVICE void pass(int lane) const {
    if constexpr (kTakes)
      if (lane == 0) ptx::mbarrier_arrive(other);
  }
};

template <class C, class S, class Score, class Params>
struct HopperRagged {
  static constexpr int kThreads = 32 * C::kWarps, kGroups = C::kWarps / 4, kDim = C::kDim, kSteps = kDim / 32;
  static constexpr int kProductKeys = 64, kTiles = C::kColumns / 8, kHeadTiles = C::kHeads / 8, kQueries = C::kQueries;
  static constexpr int kPitchBytes = C::kQueryPitchBytes, kChunks = kDim / 16;
  static_assert(C::kWarps % 8 == 0 && C::kTileKeys % kProductKeys == 0 && C::kColumns == kQueries * C::kHeads);
  static_assert(kPitchBytes == 128, "what the swizzle spans");
  using Ring = SharedKeyRing<C, S, Params>;
  using Word = typename Score::Word;

  const Params& p;
  S& shared;
  const int lane, group;
  const u32 row;              // of the lane's key among those of a product: row l/4 of its warp, + 8 in odd lanes
  Window seen;                // what any of the group's tokens sees
  float weights[kTiles][2];  // of the lane's columns

  static DSA_DEVICE void run(const Params& p, S& shared) {
    ptx::grid_dependency_launch();
    const int warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / 32, 0));
    Ring ring(p, shared, warp / 4);
    Turns<C::kTakesTurns != 0> turns(ptx::shared_address(&shared.turns[0]), warp / 4);
    // All that is read, lengths first, may come from the grid before, and what is written may still be read there.
    ptx::grid_dependency_wait();
    if (p.fills != 0) fill_outside<Score, RaggedUnit>(p, kThreads);
    Span<C, S, Params, RaggedUnit> span(p, shared);  // it meets, and barriers are set up
    const int lane = ptx::thread_index() % 32;
    HopperRagged own{p, shared, lane, warp / 4, ptx::opaque(warp % 4 * 16 + lane / 4 + lane % 2 * 8)};
#pragma unroll 1
    for (bool first = true; span.tiles != 0; span.advance(), first = false) {
      const RaggedUnit unit(p, span.unit);
      const Window all = unit.around(p);
      u32 key = all.begin + span.first_tile * C::kTileKeys;
      ring.start(key, all.end, span.tiles);
      if (!first) ptx::block_sync();  // all products are done with the image
      own.stage(unit);
      ptx::copy_async_commit();
      own.take_weights(unit);
      ptx::copy_async_wait<0>();
      ptx::block_sync();  // products, which await a tile first, read the image
      own.find_seen();
#pragma unroll 1
      for (u32 tile = 0; tile < span.tiles; ++tile) {
        ring.fill();
        ring.await();
#pragma unroll 1
        for (u32 place = 0; place < C::kTileKeys; place += kProductKeys, key += kProductKeys) {
          const u32 needed = own.seen.begin < key + kProductKeys && own.seen.end > key;
          float d[kTiles][4];
          turns.await();
          if (needed != 0) own.multiply(d, ring.operand(place));
          turns.pass(own.lane);
          // Asked for anew, so that no sum is made ahead of the arrival.
          if (ptx::opaque(needed) != 0) own.store(d, key + own.row, ring.scale(place + own.row));
        }
        ring.release();
      }
    }
  }

 private:
  // q of the unit into the image, a row a token and head, and the windows; zeros, and nothing seen, for tokens that are not.
  DSA_DEVICE void stage(const RaggedUnit& unit) const {
    const int thread = ptx::thread_index();
    const u32 image = ptx::shared_address(&shared.query[0][0]);
#pragma unroll 4
    for (int i = thread; i < kGroups * C::kColumns * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks, token = row / C::kHeads, head = row - token * C::kHeads;
      const bool there = token < unit.tokens;
      const u8* q = p.q + (there ? unit.query_byte(p, token, head) : 0) + 16 * chunk;
      ptx::copy_async_16(ptx::swizzled_address(image, row, chunk), q, there ? 16 : 0);
    }
    if (thread < kGroups * kQueries) {
      const Window window = thread < unit.tokens ? unit.window(p, thread) : Window{0, 0};
      // Where key 0 would have its score.
      const i64 from = unit.row(p, thread) * p.score_stride - static_cast<i64>(RaggedUnit::origin(p, window));
      const u64 at = reinterpret_cast<u64>(static_cast<Word*>(p.scores) + from);
      const Words4 words{window.begin, window.end - window.begin, static_cast<u32>(at), static_cast<u32>(at >> 32)};
      ptx::store_shared_16(window_place(thread), words);
    }
  }

  DSA_DEVICE u32 window_place(int token) const { return ptx::shared_address(&shared.windows[0][0]) + 16 * token; }

  // Weights are finite sums' factors: half of them where the sum has twice the value of relu.
  DSA_DEVICE void take_weights(const RaggedUnit& unit) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int token = group * kQueries + tile / kHeadTiles, head = tile % kHeadTiles * 8 + lane % 4 * 2;
      const bool there = token < unit.tokens;
      const float* from = p.weights + (there ? unit.row(p, token) * p.weight_stride + head : 0);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[tile][i] = there ? ptx::float_of(ptx::load_global_4(from + i)) : 0.0f;
        if (adds(tile)) weights[tile][i] *= 0.5f;
      }
    }
  }

  DSA_DEVICE void find_seen() {
    seen = {0xffffffffu, 0};
#pragma unroll 1
    for (int i = 0; i < kQueries; ++i) {
      const Words4 window = ptx::load_shared_16(window_place(group * kQueries + i));
      if (window.y == 0) continue;
      seen.begin = window.x < seen.begin ? window.x : seen.begin;
      seen.end = window.x + window.y > seen.end ? window.x + window.y : seen.end;
    }
  }

  // d = products of 64 keys and the group's columns.
  DSA_DEVICE void multiply(float (&d)[kTiles][4], u64 a) const {
    const u64 b = ptx::swizzled_operand(ptx::shared_address(&shared.query[0][0]) + group * (C::kColumns * kPitchBytes));
    ptx::wgmma_fence();
    ptx::WgmmaE4m3Shared<kTiles>::start(d, a, b);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) ptx::WgmmaE4m3Shared<kTiles>::add(d, a + 2 * step, b + 2 * step);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(d);
  }

  // Scores of a product: of two tokens at a time, whose four sums over columns each lane ends with one of.
  DSA_DEVICE void store(const float (&d)[kTiles][4], u32 key, float scale) const {
#pragma unroll
    for (int pair = 0; pair < kQueries; pair += 2) {
      float all[4] = {}, halves[2], own[1];
      add_token(all[0], all[1], d, pair);
      if (pair + 1 < kQueries) add_token(all[2], all[3], d, pair + 1);
      exchange<2>(halves, all, 2, lane);
      exchange<1>(own, halves, 1, lane);
      const int token = pair + lane / 2 % 2;
      if (pair + 1 >= kQueries && token > pair) continue;
      const Words4 window = ptx::load_shared_16(window_place(group * kQueries + token));
      if (key - window.x >= window.y) continue;
      Word* row = reinterpret_cast<Word*>(static_cast<u64>(window.w) << 32 | window.z);
      row[key] = Score::of(own[0] * scale);
    }
  }

  // Sums of a token's columns of the lane: rows r and r + 8, each of even and odd columns first.
  DSA_DEVICE void add_token(float& low, float& high, const float (&d)[kTiles][4], int token) const {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kHeadTiles; ++i) {
      const int tile = token * kHeadTiles + i;
#pragma unroll
      for (int n = 0; n < 4; ++n) sums[n] = weights[tile][n % 2] * positive(d[tile][n], adds(tile)) + sums[n];
    }
    low = sums[0] + sums[1], high = sums[2] + sums[3];
  }

  // Columns whose relu is made by an addition, in the pipe of the sums: all of them in the integer pipe would take longer.
  static DSA_DEVICE constexpr bool adds(int tile) { return C::kAddedOf != 0 && tile % C::kAddedOf == C::kAddedOf - 1; }

  // relu(x), or twice of it.
  static DSA_DEVICE float positive(float x, bool by_adding) { return by_adding ? x + __builtin_fabsf(x) : ptx::max_nan(x, 0.0f); }
};

}  // namespace indexer_logits
