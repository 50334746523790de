// Indexer logits for Hopper: warpgroup products of e4m3 codes as they come, or of 16-bit numbers with the scales of blocks.
//
//   scores[t, j] = scale_j * sum_h w[t, h] * relu(q[t, h] . k_j)
//
// where scale_j is 1 for keys whose blocks of dims have scales of their own.
//
// Keys are the M of a product, 64 of them, 16 a warp, and a warp holds those of two products in registers for all tokens of a
// unit. The heads of a token, or half of them, are its N, which the tensor cores read from an image of q in shared memory.
// While the sums over heads of a product are made, the next one runs.
//
//   time ->  warp   | bulk copies of tiles i .. i + S - 1 | wait i | tile i to registers | copies of tile i + S | products ..
//            group  | first product of token t, sums and scores of t - 1 | second product, sums of the first | first of t + 1 ..
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
  using Spans = Span<C, S, Params, Unit, C::kLeastTileKeys>;
  using Word = typename Score::Word;

  static DSA_DEVICE void run(const Params& p, S& shared) {
    ptx::grid_dependency_launch();
    const int lane = ptx::thread_index() % 32, warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / 32, 0));
    if (p.wide_copies != 0 && p.page_size % kWarpKeys == 0) {
      run<BulkKeyRing<C, S, Operands, Params, true>>(p, shared, warp, lane);
    } else {
      run<BulkKeyRing<C, S, Operands, Params, false>>(p, shared, warp, lane);
    }
  }

 private:
  template <class Ring>
  static DSA_DEVICE void run(const Params& p, S& shared, int warp, int lane) {
    const PlaceOf<S> place(shared);
    Ring ring(p, place, warp, lane);
//% if parts.counts
    Counts counts(place.operands() + kFirstCount, p.unit_tokens);
//% endif
    prefetch_requests<C>(p);
    // All that is read, lengths first, may come from the grid before, and what is written may still be read there.
    ptx::grid_dependency_wait();
    if (p.fills != 0) fill_outside<Score, Unit>(p, kThreads);
//% if parts.epilogue
    Score::Epilogue::begin(p, kThreads);
//% endif
    Spans span(p, shared);
#pragma unroll 1
    for (bool first = true; span.tiles != 0; span.advance(), first = false) {
      const Unit unit(p, span.unit);
      // What copies need is asked for first, and what products need before it is waited for.
      ring.ask(unit, span.first_tile, span.tiles, span.tile_keys);
      Image image;
      image.ask(p, unit);
      ring.start();
      if (!first) ptx::block_sync();  // all warps are done with the image
//% if parts.counts
      counts.take(p, unit);
//% endif
      image.store(p, place, unit);
      ptx::fence_proxy_async();  // products read the image
      ptx::block_sync();
      const Tiles tiles{span, static_cast<Word*>(p.scores) + unit.row(p, 0) * p.score_stride, warp, lane};
      span.tile_keys > kProductKeys ? score(p, place, unit.tokens, ring, tiles) : score_small(p, place, unit.tokens, ring, tiles);
    }
//% if parts.counts
    counts.finish(p);
//% endif
  }

  static constexpr u32 kNoKey = 0xffffffffu, kProductKeys = 64;
  static constexpr int kPartBytes = 8 * kTiles * C::kQueryPitchBytes, kPartWeights = C::kWeightWords / kParts;
  static constexpr int kTokenGap = C::kTokenBytes - kParts * kPartBytes;  // rows of q continue there
//% if parts.counts

  // A token's counts lie behind its rows of q.
  using Counts = ScoreCounts<C, C::kTokenBytes>;
  static constexpr u32 kFirstCount = C::kTokenBytes - Counts::kBytes;
  static_assert(__builtin_offsetof(S, operands) == 0 && alignof(S) >= 32);

  // Of the token whose limit is there: shared memory begins at a multiple of what operands do.
  static DSA_DEVICE u32 counts_of(u32 limit) {
    const u32 at = limit - static_cast<u32>(__builtin_offsetof(S, limits)), token = at % 32 / 4;
    return at - 4 * token + token * C::kTokenBytes + kFirstCount;
  }
//% endif

  // The warpgroup's tiles of a unit, and the lane's own key in each.
  struct Tiles {
    const Spans& span;
    Word* rows;  // scores of key 0
    int warp, lane;

    DSA_DEVICE u32 key(u32 tile) const {
      const u32 own_keys = span.tile_keys / 4, place = static_cast<u32>(OwnKey::place(lane));
      return place < own_keys ? (span.first_tile + tile) * span.tile_keys + warp % 4 * own_keys + place : kNoKey;
    }
  };

  // What a lane stores next: the score of `key` for a token that sees keys below the number that is at `limit`.
  struct OwnScore {
    Word* to;
    u32 key, limit;
    OwnKey own;

    float all[4];

    // Of the columns that this lane has; the sums become zeros.
    DSA_DEVICE void collect(float (&sums)[2][4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) all[i] = sums[i / 2][i % 2 * 2] + sums[i / 2][i % 2 * 2 + 1];
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = 0.0f;
    }

    // The four lanes of a row have columns of their own, and sums of four keys; each ends with one key's.
    DSA_DEVICE float own_sum(int lane) const {
      float halves[2], sum[1];
      exchange<2>(halves, all, 2, lane);
      exchange<1>(sum, halves, 1, lane);
      return sum[0];
    }

    DSA_DEVICE void store(float sum) const {
      const u32 keys = ptx::load_shared_4(limit);
      if (key < keys) *to = Score::of(own.held ? sum * own.scale : kNegInf);
//% if parts.counts
      if (key < keys) count_score<C>(counts_of(limit), Score::of(own.held ? sum * own.scale : kNegInf));
//% endif
    }

    DSA_DEVICE void on(i64 stride) { to += stride, limit += 4; }
  };

  // Products x, of the first keys of a tile, and y, of the others, in turn: part by part of the heads of one token after the
  // other, tile after tile. While one runs, the sums of the one before it are made. Tokens that do not see a tile are
  // multiplied, too.
  template <class Ring>
  static DSA_DEVICE void score(const Params& p, const PlaceOf<S>& place, int tokens, Ring& ring, const Tiles& tiles) {
    u32 a[2][kSteps][4];
    float x[kTiles][4], y[kTiles][4] = {}, sums[2][4] = {};
    PartWeights w{};
    OwnScore last{tiles.rows, kNoKey, place.limits(), {}, {}};
//% if parts.epilogue
    const typename Score::Epilogue epilogue(p, tiles.span.unit, place.limits());
//% endif
#pragma unroll 1
    for (u32 tile = tiles.warp / 4; tile < tiles.span.tiles; tile += C::kWarps / 4) {
      OwnScore next{tiles.rows + tiles.key(tile), tiles.key(tile), place.limits(), {}, {}};
      ring.take(a, next.own);
      u64 b = ptx::swizzled_operand(place.operands());
      u32 weights = place.weights() + tiles.lane % 4 * 16;
      int part = 0;
#pragma unroll 1
      for (int left = tokens * kParts; left > 0; --left) {
        ptx::wgmma_fence();
        Operands::start(x, a[0], b);
        if (left == tokens * kParts) ring.refill();
        w.add(sums[1], y);
        const bool whole = kParts == 1 || part == 0;  // sums of a token
        if (whole) last.collect(sums);
        w.load(weights);
        ptx::wgmma_fence();
        Operands::start(y, a[1], b);
        ptx::wgmma_wait<1>();
        ptx::hold(x);
        // Lanes wait for each other's sums while these are added: not sooner, which would hold up the products. So the number of the
        // lane comes from x, of which nothing is left.
        const int lane = tiles.lane | static_cast<int>(ptx::bits_of(x[0][0]) >> 31 >> left);
        const float own = whole ? last.own_sum(lane) : 0.0f;
        w.add(sums[0], x);
        if (whole) {
          last.store(own);
//% if parts.epilogue
          epilogue.store(last, own);
//% endif
          last = next;
          next.on(p.score_stride);
        }
        ptx::wgmma_wait<0>();
        ptx::hold(y);
        b += kPartBytes / 16, weights += kPartWeights * 4;
        if (kParts == 1 || ++part == kParts) b += kTokenGap / 16, part = 0;
      }
    }
    w.add(sums[1], y);
    last.collect(sums);
//% if parts.epilogue
    const float own = last.own_sum(tiles.lane);
    last.store(own);
    epilogue.store(last, own);
//% else
    last.store(last.own_sum(tiles.lane));
//% endif
  }

  // The same of tiles of up to 64 keys, all among those of the first product.
  template <class Ring>
  static DSA_DEVICE void score_small(const Params& p, const PlaceOf<S>& place, int tokens, Ring& ring, const Tiles& tiles) {
    u32 a[2][kSteps][4];
    float sums[2][4] = {};
//% if parts.epilogue
    const typename Score::Epilogue epilogue(p, tiles.span.unit, place.limits());
//% endif
#pragma unroll 1
    for (u32 tile = tiles.warp / 4; tile < tiles.span.tiles; tile += C::kWarps / 4) {
      OwnScore next{tiles.rows + tiles.key(tile), tiles.key(tile), place.limits(), {}, {}};
      ring.take_and_refill(a, next.own);
      u64 b = ptx::swizzled_operand(place.operands());
      u32 weights = place.weights() + tiles.lane % 4 * 16;
#pragma unroll 1
      for (int token = 0; token < tokens; ++token) {
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
          float x[kTiles][4];
          ptx::wgmma_fence();
          Operands::start(x, a[0], b);
          PartWeights w;
          w.load(weights);
          ptx::wgmma_wait<0>();
          ptx::hold(x);
          w.add(sums[0], x);
          b += kPartBytes / 16, weights += kPartWeights * 4;
        }
        next.collect(sums);
//% if parts.epilogue
        const float own = next.own_sum(tiles.lane);
        next.store(own);
        epilogue.store(next, own);
//% else
        next.store(next.own_sum(tiles.lane));
//% endif
        next.on(p.score_stride);
        b += kTokenGap / 16;
      }
    }
  }

  // A lane's weights of a part of the heads.
  struct PartWeights {
    Words4 of[(kTiles + 1) / 2];

    DSA_DEVICE void load(u32 at) {
#pragma unroll
      for (int i = 0; i < (kTiles + 1) / 2; ++i) of[i] = ptx::load_shared_16(at + 64 * i);
    }

    // sums += weight x relu: rows r and r + 8, each of even and odd columns.
    DSA_DEVICE void add(float (&sums)[4], const float (&d)[kTiles][4]) const {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const Words4& w = of[j / 2];
        const float even = ptx::float_of(j % 2 == 0 ? w.x : w.z), odd = ptx::float_of(j % 2 == 0 ? w.y : w.w);
        sums[0] = even * ptx::max_nan(d[j][0], 0.0f) + sums[0], sums[1] = odd * ptx::max_nan(d[j][1], 0.0f) + sums[1];
        sums[2] = even * ptx::max_nan(d[j][2], 0.0f) + sums[2], sums[3] = odd * ptx::max_nan(d[j][3], 0.0f) + sums[3];
      }
    }
  };
};

}  // namespace indexer_logits
