// Indexer logits for Hopper: warpgroup products of e4m3 codes as they come, or of 16-bit numbers with the scales of blocks.
//
//   scores[t, j] = scale_j * sum_h w[t, h] * relu(q[t, h] . k_j)
//
// where scale_j is 1 for keys whose blocks of dims have scales of their own.
//
// Keys are the M of a product, 64 of them, 16 a warp, and a warp holds those of two products in registers for all tokens of a
// unit. The heads of a token, or half of them, are its N, which the tensor cores read from an image of q in shared memory.
// While the first product's sums over heads are made, the second one runs.
//
//   time ->  warp   | bulk copies of tiles i .. i + S - 1 | wait i | tile i to registers | copies of tile i + S | products ..
//            group  | both products of token t | sums of the first | sums of the second, scores | products of t + 1 | ..
//            block  | q image of the unit | meet | tiles of the unit, dealt to the warpgroups in turn | meet | next image ..
//
//   landed[warp][stage]  the warp's own copies arrive: bulk copies by their bytes, those of words by each lane. Its lanes
//                        wait, read, and meet before they refill: no other warp knows of its ring.
//
// Tiles of a few requests are halved and quartered until every block has one: a warp then has fewer keys.
//
// The blocks of the grid take equal spans of the tiles of all units; none looks at what another does.
#pragma once
#include "indexer_logits/hopper_keys.cuh"
#include "indexer_logits/hopper_operands.cuh"
#include "indexer_logits/hopper_query.cuh"
#include "indexer_logits/store.cuh"
#include "indexer_logits/work.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/max_nan.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/ptx/wgmma.cuh"

namespace indexer_logits {

template <class C, class S, class Operands, class Score, class Params>
struct Hopper {
  static constexpr int kThreads = 32 * C::kWarps, kDim = C::kDim;
  static constexpr int kSteps = Operands::kSteps;
  // Heads that are multiplied at a time: accumulators of more would leave no registers.
  static constexpr int kParts = C::kParts, kTiles = C::kRows / kParts / 8;
  static_assert(C::kWarps % 4 == 0 && C::kTileKeys == 4 * kWarpKeys && C::kRows % (8 * kParts) == 0 && kTiles <= 8);
  static_assert(C::kQueryPitchBytes == 128, "what the swizzle spans");
  using Image = OperandImage<C, S, Operands, Params>;
  using Ring = BulkKeyRing<C, S, Operands, Params>;
  using Word = typename Score::Word;

  static DSA_DEVICE void run(const Params& p, S& shared) {
    ptx::grid_dependency_launch();
    const int lane = ptx::thread_index() % 32, warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / 32, 0));
    const PlaceOf<S> place(shared);
    Ring ring(p, place, warp, lane);
    // All that is read, lengths first, may come from the grid before, and what is written may still be read there.
    ptx::grid_dependency_wait();
    if (p.fills != 0) fill_outside<Score, Unit>(p, kThreads);
    Span<C, S, Params, Unit, C::kLeastTileKeys> span(p, shared);
#pragma unroll 1
    for (bool first = true; span.tiles != 0; span.advance(), first = false) {
      const Unit unit(p, span.unit);
      ring.start(unit, span.first_tile, span.tiles, span.tile_keys);
      if (!first) ptx::block_sync();  // all warps are done with the image
      Image::stage(p, place, unit);
      ptx::fence_proxy_async();  // products read the image
      ptx::block_sync();
      Word* rows = static_cast<Word*>(p.scores) + unit.row(p, 0) * p.score_stride;
#pragma unroll 1
      for (u32 tile = warp / 4; tile < span.tiles; tile += C::kWarps / 4) {
        u32 a[2][kSteps][4];
        OwnKey own;
        ring.take(a, own);
        const u32 first_key = (span.first_tile + tile) * span.tile_keys, own_keys = span.tile_keys / 4;
        const bool has = static_cast<u32>(OwnKey::place(lane)) < own_keys;
        const u32 key = has ? first_key + warp % 4 * own_keys + OwnKey::place(lane) : kNoKey;
        score_tile(p, place, unit.tokens, rows, first_key, key, own_keys > 16, a, own, lane);
      }
    }
  }

 private:
  static constexpr u32 kNoKey = 0xffffffffu;

  // `key` is the lane's own. Where tiles are small no key is among those of the second product.
  static DSA_DEVICE void score_tile(const Params& p, const PlaceOf<S>& place, int tokens, Word* rows, u32 first_key, u32 key,
                                    bool both, const u32 (&a)[2][kSteps][4], const OwnKey& own, int lane) {
#pragma unroll 1
    for (int token = 0; token < tokens; ++token) {
      const u32 limit = ptx::load_shared_4(place.limits() + 4 * token);
      if (limit <= first_key) continue;
      u32 image = place.query() + token * (C::kRows * C::kQueryPitchBytes);
      u32 weights = place.weights() + token * (C::kWeightWords * 4) + lane % 4 * 16;
      float sums[2][4] = {};
      // A loop, so that no part's accumulators have registers beside those of the one before.
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        both ? multiply(sums, a, ptx::swizzled_operand(image), weights)
             : multiply_first(sums, a, ptx::swizzled_operand(image), weights);
        image += 8 * kTiles * C::kQueryPitchBytes, weights += C::kWeightWords / kParts * 4;
      }
      const float score = own_sum(sums, lane) * own.scale;
      if (key < limit) rows[token * p.score_stride + key] = Score::of(own.held ? score : kNegInf);
    }
  }

  // sums += weight x relu of a part of the heads, whose rows of the image begin at `b`, for the keys of both products.
  static DSA_DEVICE void multiply(float (&sums)[2][4], const u32 (&a)[2][kSteps][4], u64 b, u32 weights) {
    float x[kTiles][4], y[kTiles][4];
    ptx::wgmma_fence();
    Operands::start(x, a[0], b);
    Operands::start(y, a[1], b);
    ptx::wgmma_wait<1>();
    ptx::hold(x);
    add(sums[0], x, weights);
    ptx::wgmma_wait<0>();
    ptx::hold(y);
    add(sums[1], y, weights);
  }

  static DSA_DEVICE void multiply_first(float (&sums)[2][4], const u32 (&a)[2][kSteps][4], u64 b, u32 weights) {
    float x[kTiles][4];
    ptx::wgmma_fence();
    Operands::start(x, a[0], b);
    ptx::wgmma_wait<0>();
    ptx::hold(x);
    add(sums[0], x, weights);
  }

  // sums += weight x relu: rows r and r + 8, each of even and odd columns.
  static DSA_DEVICE void add(float (&sums)[4], const float (&d)[kTiles][4], u32 weights) {
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      const Words4 w = ptx::load_shared_16(weights + 32 * j);
      add(sums, d[j], ptx::float_of(w.x), ptx::float_of(w.y));
      if (j + 1 < kTiles) add(sums, d[j + 1], ptx::float_of(w.z), ptx::float_of(w.w));
    }
  }

  static DSA_DEVICE void add(float (&sums)[4], const float (&d)[4], float even, float odd) {
    sums[0] = even * ptx::max_nan(d[0], 0.0f) + sums[0], sums[1] = odd * ptx::max_nan(d[1], 0.0f) + sums[1];
    sums[2] = even * ptx::max_nan(d[2], 0.0f) + sums[2], sums[3] = odd * ptx::max_nan(d[3], 0.0f) + sums[3];
  }

  // The four lanes of a row have columns of their own, and sums of four keys; each ends with one key's.
  static DSA_DEVICE float own_sum(const float (&sums)[2][4], int lane) {
    const float all[4] = {sums[0][0] + sums[0][1], sums[0][2] + sums[0][3], sums[1][0] + sums[1][1], sums[1][2] + sums[1][3]};
    float halves[2], own[1];
    exchange<2>(halves, all, 2, lane);
    exchange<1>(own, halves, 1, lane);
    return own[0];
  }
};

}  // namespace indexer_logits
