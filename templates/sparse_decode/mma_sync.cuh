// Sparse MLA decode for every arch: mma.sync on raw cache rows gathered by asynchronous copies. One CTA handles one
// query token, one group of up to kHeads heads and one split of the index row.
//
// Swapped form: S^T[tokens x heads] = K Q^T, then O^T[dims x heads] = V^T P^T, so heads are the narrow MMA dimension and
// are padded to a multiple of 8 only.
//
//   warp w of kWarps     scores:  tokens 16 (w % kRowBlocks) .., a share of the head tiles      (S in registers)
//                        values:  dims w kValueDims / kWarps .., all heads                      (O in registers)
//
//   time ->   | wait tile i | A | start tile i+stages-1 | scores, P | B | O += V P | wait tile i+1 | A | ...
//   A: barrier_sync. Every warp's copies of tile i have landed; every warp is done with P and with the stage that the next
//      copies overwrite.
//   B: barrier_any. P is complete; carries whether some score outgrew the softmax reference.
//   Slow path (rare): raise the reference: column maxima -> barrier -> new reference, P again, factors -> barrier -> scale O.
//
// Softmax reference: instead of a running maximum, a reference M per head that is raised only when a score exceeds it by
// kLazyThreshold (log2 units). The result is exact for any M; L >= 2^-kLazyThreshold keeps it in range. P is masked after
// exp2, never through -inf minus -inf, and rows without a valid id are zero in shared memory, so that nothing stale meets
// a zero probability.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/gather.cuh"

namespace sparse_decode {

// M before any valid token: far below every finite score, and finite, so that differences stay numbers.
constexpr float kNoReference = -1e30f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = __builtin_huge_valf();

template <class C, class Shared, class Encoding, class Params>
struct MmaSync {
  static constexpr int kRowBlocks = C::kTileTokens / 16;
  static constexpr int kHeadTiles = C::kHeads / 8;
  static constexpr int kHeadShares = C::kWarps / kRowBlocks;  // warps among which the head tiles of a row block are dealt
  static constexpr int kShareTiles = (kHeadTiles + kHeadShares - 1) / kHeadShares;
  static constexpr int kWarpDims = C::kValueDims / C::kWarps;
  static constexpr int kBlocks = kWarpDims / 16;
  static constexpr int kThreads = C::kWarps * 32;
  static constexpr int kGatherRows = tile::RowGather<C>::kRows;
  static constexpr int kProbabilityBytes = C::kTileTokens * C::kProbabilityPitchBytes;
  static constexpr int kQueryChunks = (C::kNopeDims + C::kRopeDims) / 8;
  static_assert(C::kTileTokens % 16 == 0 && C::kWarps % kRowBlocks == 0 && kWarpDims % 32 == 0 && C::kHeads % 8 == 0);
  static_assert(C::kValueDims / Encoding::kProbabilityCopies % kWarpDims == 0, "a warp's dims share one probability copy");

  const Params& p;
  Shared& shared;
  int warp, lane;
  // Work of this CTA.
  int batch, token, split, first_head, heads;
  i64 row;
  int length, tiles;  // live columns of the index row; tiles of this split: split, split + num_splits, ...
  const i32* indices;
  // Scores side: this warp's head tiles, per column pair of a tile the logit factor, the reference and the partial sum.
  int row_block, tile_begin, tile_count;
  float factor[kShareTiles][2], reference[kShareTiles][2], sum[kShareTiles][2];
  float output[kBlocks][kHeadTiles][4];

  DSA_DEVICE MmaSync(const Params& params, Shared& storage) : p(params), shared(storage), output{} {
    warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / 32, 0));
    lane = ptx::thread_index() % 32;
    u32 item = ptx::block_index();
    const int group = item % p.head_groups;
    item /= p.head_groups;
    split = item % p.num_splits;
    row = item / p.num_splits;
    batch = static_cast<int>(row / p.s_q);
    token = static_cast<int>(row % p.s_q);
    first_head = group * p.group_heads;
    heads = p.heads - first_head < p.group_heads ? p.heads - first_head : p.group_heads;
    length = p.topk;
    if (p.topk_length != nullptr) {
      const int given = p.topk_length[batch * p.length_stride_b + token * p.length_stride_s];
      length = given < 0 ? 0 : given < length ? given : length;
    }
    const int all_tiles = (length + C::kTileTokens - 1) / C::kTileTokens;
    tiles = split < all_tiles ? (all_tiles - split + p.num_splits - 1) / p.num_splits : 0;
    indices = p.indices + batch * p.indices_stride_b + token * p.indices_stride_s;
    row_block = warp % kRowBlocks;
    const int share = warp / kRowBlocks;
    tile_begin = share * kHeadTiles / kHeadShares;
    tile_count = (share + 1) * kHeadTiles / kHeadShares - tile_begin;
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) reference[j][e] = kNoReference, sum[j][e] = 0.0f;
  }

  DSA_DEVICE void run() {
    const tile::RowGather<C> gather{p.kv, p.page_stride_bytes, p.row_stride_bytes, p.pool_tokens,
                                    {p.page_multiplier, p.page_shift, p.page_size}};
#pragma unroll
    for (int i = 0; i < C::kStages - 1; ++i) {
      if (i < tiles) start_tile(gather, i, load_id(i));
      ptx::copy_async_commit();
    }
    i32 next_id = load_id(C::kStages - 1);
    stage_query();
    ptx::barrier_sync();
    load_factors();
    int stage = 0;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      ptx::copy_async_wait<C::kStages - 2>();
      ptx::barrier_sync();  // A
      const int refill = stage == 0 ? C::kStages - 1 : stage - 1;
      if (i + C::kStages - 1 < tiles) start_tile(gather, refill, next_id);
      ptx::copy_async_commit();
      next_id = load_id(i + C::kStages);
      if (any_valid(stage)) process(stage);
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
    ptx::copy_async_wait<0>();
    finish();
  }

 private:
  // ---- gather -------------------------------------------------------------------------------------------------------

  // Id of this lane's row in this split's i-th tile, -1 where there is none.
  DSA_DEVICE i32 load_id(int i) const {
    const i64 column = (static_cast<i64>(i) * p.num_splits + split) * C::kTileTokens + warp * kGatherRows + lane;
    return lane < kGatherRows && column < length ? indices[column] : -1;
  }

  DSA_DEVICE void start_tile(const tile::RowGather<C>& gather, int stage, i32 id) {
    const u32 mask = gather.start(rows_of(stage) + warp * kGatherRows * C::kRowPitchBytes, id, lane);
    if (lane == 0) shared.valid[stage][warp] = mask;
  }

  DSA_DEVICE u32 rows_of(int stage) const {
    return ptx::shared_address(shared.rows) + stage * (C::kTileTokens * C::kRowPitchBytes);
  }

  DSA_DEVICE bool any_valid(int stage) const {
    u32 any = 0;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) any |= shared.valid[stage][w];
    return any != 0;
  }

  DSA_DEVICE bool valid_row(int stage, int row_in_tile) const {
    return shared.valid[stage][row_in_tile / kGatherRows] >> (row_in_tile % kGatherRows) & 1;
  }

  // ---- query --------------------------------------------------------------------------------------------------------

  // One warp per head row: bf16 global -> query image. Where the encoding asks for it each row is scaled by a power of
  // two that brings its largest element to [2^14, 2^15), so that f16 keeps every element exactly (those 2^-29 below the
  // largest excepted); the inverse goes into the logit factor. Heads past the group's end become zero rows.
  DSA_DEVICE void stage_query() {
    const u32 image = ptx::shared_address(shared.query);
#pragma unroll 1
    for (int h = warp; h < C::kHeads; h += C::kWarps) {
      const bool live = h < heads;
      const u16* source = p.q + batch * p.q_stride_b + token * p.q_stride_s + (first_head + h) * p.q_stride_h;
      constexpr int kLoads = (kQueryChunks + 31) / 32;
      Words4 q[kLoads];
      u32 largest = 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int chunk = i * 32 + lane;
        q[i] = live && chunk < kQueryChunks ? ptx::load_global_16(source + 8 * chunk) : Words4{0, 0, 0, 0};
        largest = max_magnitude(max_magnitude(max_magnitude(max_magnitude(largest, q[i].x), q[i].y), q[i].z), q[i].w);
      }
      int exponent = 0;
      if (Encoding::kNormaliseQuery) exponent = row_exponent(largest);
      const float down = ptx::float_of(static_cast<u32>(127 - exponent) << 23);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int chunk = i * 32 + lane;
        if (chunk < kQueryChunks) Encoding::stage_query(image + h * C::kQueryPitchBytes, chunk, q[i], down);
      }
      if (lane == 0) shared.query_factor[h] = p.scale_log2 * ptx::float_of(static_cast<u32>(127 + exponent) << 23);
    }
  }

  static DSA_DEVICE u32 max_magnitude(u32 largest, u32 pair) {
    const u32 low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu, both = low > high ? low : high;
    return largest > both ? largest : both;
  }

  // Exponent e with 2^14 <= largest / 2^e < 2^15; 0 where the row holds an infinity or NaN, which then passes unchanged.
  static DSA_DEVICE int row_exponent(u32 largest) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const u32 other = ptx::shuffle_xor(largest, mask);
      largest = largest > other ? largest : other;
    }
    if (largest >= 0x7f80u || largest == 0) return 0;
    const int exponent = static_cast<int>(largest >> 7) - 127 - 14;
    return exponent < -100 ? -100 : exponent;
  }

  DSA_DEVICE void load_factors() {
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) factor[j][e] = j < tile_count ? shared.query_factor[column(j, e)] : 0.0f;
  }

  // Head column of element e (0, 1) of this lane in head tile j of this warp's share.
  DSA_DEVICE int column(int j, int e) const { return (tile_begin + j) * 8 + 2 * (lane % 4) + e; }

  // ---- one tile -----------------------------------------------------------------------------------------------------

  DSA_DEVICE void process(int stage) {
    const u32 rows = rows_of(stage);
    float s[kShareTiles][4] = {}, probability[kShareTiles][4];
    score(s, rows);
    const int low = row_block * 16 + lane / 4;
    const bool valid[2] = {valid_row(stage, low), valid_row(stage, low + 8)};
    bool outgrown = store_probabilities(s, probability, valid, rows);
    if (ptx::barrier_any(outgrown)) raise_reference(s, probability, valid, rows);  // B
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[j][e] += probability[j][e] + probability[j][e + 2];
    accumulate(rows);
  }

  // Scores in log2 units: S times the logit factor.
  DSA_DEVICE void score(float (&s)[kShareTiles][4], u32 rows) const {
    const u32 block = rows + row_block * 16 * C::kRowPitchBytes;
    const u32 query = ptx::shared_address(shared.query) + tile_begin * 8 * C::kQueryPitchBytes;
    if (kHeadTiles % kHeadShares == 0 || tile_count == kShareTiles) {
      Encoding::score(s, block, query, lane);
    } else if constexpr (kShareTiles > 1) {
      float fewer[kShareTiles - 1][4] = {};
      Encoding::score(fewer, block, query, lane);
#pragma unroll
      for (int j = 0; j < kShareTiles - 1; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = fewer[j][i];
    }
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] *= factor[j][i % 2];
  }

  // probability = 2^(s - M) of valid tokens, 0 of others, and its bf16 copies in shared memory, one per scale group.
  // Returns whether a score outgrew its reference.
  DSA_DEVICE bool store_probabilities(const float (&s)[kShareTiles][4], float (&probability)[kShareTiles][4],
                                      const bool (&valid)[2], u32 rows) {
    bool outgrown = false;
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[j][i] - reference[j][i % 2];
        outgrown |= valid[i / 2] && j < tile_count && x > C::kLazyThreshold;
        probability[j][i] = valid[i / 2] ? ptx::exp2_approx(x) : 0.0f;
      }
    const int low = row_block * 16 + lane / 4;
#pragma unroll
    for (int copy = 0; copy < Encoding::kProbabilityCopies; ++copy) {
      const u32 target = ptx::shared_address(shared.probability) + copy * kProbabilityBytes + low * C::kProbabilityPitchBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 row_address = rows + (low + 8 * half) * C::kRowPitchBytes;
        const float scale = Encoding::scale(row_address, copy) * Encoding::kProbabilityScale;
#pragma unroll
        for (int j = 0; j < kShareTiles; ++j) {
          const float a = valid[half] ? probability[j][2 * half] * scale : 0.0f;
          const float b = valid[half] ? probability[j][2 * half + 1] * scale : 0.0f;
          if (j < tile_count)
            ptx::store_shared_4(target + 8 * half * C::kProbabilityPitchBytes + 2 * column(j, 0), ptx::pack_bf16(a, b));
        }
      }
    }
    return outgrown;
  }

  // Slow path: M becomes the exact maximum so far; what was accumulated under the old M is scaled down.
  DSA_DEVICE void raise_reference(const float (&s)[kShareTiles][4], float (&probability)[kShareTiles][4],
                                  const bool (&valid)[2], u32 rows) {
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = larger(valid[0] ? s[j][e] : kNoReference, valid[1] ? s[j][e + 2] : kNoReference);
        top = over_rows_max(top);
        if (lane < 4 && j < tile_count) shared.block_value[row_block][column(j, e)] = top;
      }
    ptx::barrier_sync();
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (j >= tile_count) continue;
        float top = reference[j][e];
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) top = larger(top, shared.block_value[b][column(j, e)]);
        const float shrink = ptx::exp2_approx(reference[j][e] - top);
        reference[j][e] = top;
        sum[j][e] *= shrink;
        if (lane < 4 && row_block == 0) shared.output_factor[column(j, e)] = shrink;
      }
    store_probabilities(s, probability, valid, rows);
    ptx::barrier_sync();
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float shrink = shared.output_factor[8 * t + 2 * (lane % 4) + e];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) output[block][t][e] *= shrink, output[block][t][e + 2] *= shrink;
      }
  }

  static DSA_DEVICE float larger(float a, float b) { return a > b ? a : b; }

  // Over the 8 lanes that hold the same column.
  static DSA_DEVICE float over_rows_max(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x = larger(x, ptx::float_of(ptx::shuffle_xor(ptx::bits_of(x), mask)));
    return x;
  }

  static DSA_DEVICE float over_rows_sum(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x += ptx::float_of(ptx::shuffle_xor(ptx::bits_of(x), mask));
    return x;
  }

  // O^T += V^T P^T for this warp's dims.
  DSA_DEVICE void accumulate(u32 rows) {
    constexpr int kCopyDims = C::kValueDims / Encoding::kProbabilityCopies;
    const int first_dim = warp * kWarpDims;
    // Lane's row of the 16 x 16 block of P that one transposed matrix load covers.
    const u32 probability = ptx::shared_address(shared.probability) + first_dim / kCopyDims * kProbabilityBytes +
                            lane % 16 * C::kProbabilityPitchBytes + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < kRowBlocks; ++k) {
      u32 b[kHeadTiles][2];
#pragma unroll
      for (int t = 0; t + 1 < kHeadTiles; t += 2) {
        const Words4 w = ptx::load_matrix_x4_trans(probability + k * 16 * C::kProbabilityPitchBytes + t * 16);
        b[t][0] = w.x, b[t][1] = w.y, b[t + 1][0] = w.z, b[t + 1][1] = w.w;
      }
      if constexpr (kHeadTiles % 2 != 0) {
        constexpr int t = kHeadTiles - 1;
        ptx::load_matrix_x2_trans(b[t][0], b[t][1], probability - lane / 16 * 16 + k * 16 * C::kProbabilityPitchBytes + t * 16);
      }
#pragma unroll
      for (int block = 0; block < kBlocks; block += Encoding::kBlocksPerLoad) {
        u32 a[Encoding::kBlocksPerLoad][4];
        Encoding::value_blocks(a, rows + k * 16 * C::kRowPitchBytes, first_dim + block * 16, lane);
#pragma unroll
        for (int i = 0; i < Encoding::kBlocksPerLoad; ++i)
#pragma unroll
          for (int t = 0; t < kHeadTiles; ++t)
            ptx::mma_bf16(output[block + i][t], a[i][0], a[i][1], a[i][2], a[i][3], b[t][0], b[t][1]);
      }
    }
  }

  // ---- end ----------------------------------------------------------------------------------------------------------

  DSA_DEVICE void finish() {
    ptx::barrier_sync();  // the slow path of the last tile may still be reading output_factor
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float total = over_rows_sum(sum[j][e]);
        if (lane < 4 && j < tile_count) {
          shared.block_value[row_block][column(j, e)] = total;
          if (row_block == 0) shared.output_factor[column(j, e)] = reference[j][e];
        }
      }
    ptx::barrier_sync();
    if (ptx::thread_index() < C::kHeads) write_lse(ptx::thread_index());
    if (tiles == 0 && p.num_splits > 1) return;  // the combine gives an empty split no weight and does not read it
    ptx::barrier_sync();
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int h = 8 * t + 2 * (lane % 4) + e;
        const float scale = shared.query_factor[h];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
          write_pair(h, warp * kWarpDims + block * 16, output[block][t][e] * scale, output[block][t][e + 2] * scale);
      }
  }

  // One thread per head: total of P, log-sum-exp, and the factor that turns O into the output (kept in query_factor).
  DSA_DEVICE void write_lse(int h) {
    float total = 0.0f;
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) total += shared.block_value[b][h];
    const bool empty = total == 0.0f;
    const float lse = empty ? -kInfinity : shared.output_factor[h] + ptx::log2_approx(total);
    float scale = empty ? 0.0f : Encoding::kOutputScale / total;
    if (h < heads) {
      if (p.num_splits > 1) {
        p.lse_accum[(row * p.num_splits + split) * p.heads + first_head + h] = lse;
      } else {
        if (p.attn_sink != nullptr && !empty) scale /= 1.0f + ptx::exp2_approx(p.attn_sink[first_head + h] * kLog2E - lse);
        p.lse[batch * p.lse_stride_b + token * p.lse_stride_s + (first_head + h) * p.lse_stride_h] =
            empty ? p.empty_lse : lse * p.lse_unit;
      }
    }
    shared.query_factor[h] = scale;
  }

  // Values of block rows r = lane / 4 (`a`) and r + 8 (`b`) of head h -> two neighbouring dims per lane.
  DSA_DEVICE void write_pair(int h, int block_dim, float a, float b) {
    int dim = block_dim + 2 * (lane / 4);
    if constexpr (!Encoding::kRowsAreNeighbours) {
      // Lanes with even r keep dims r, r + 1 of the first half, odd r dims r + 7, r + 8: one exchange with lane ^ 4.
      const bool odd = lane / 4 % 2;
      const float received = ptx::float_of(ptx::shuffle_xor(ptx::bits_of(odd ? a : b), 4));
      dim = block_dim + (odd ? 7 : 0) + lane / 4;
      if (odd) a = received;
      else b = received;
    }
    if (h >= heads) return;
    if (p.num_splits > 1) {
      float* target = p.o_accum + ((row * p.num_splits + split) * p.heads + first_head + h) * C::kValueDims + dim;
      target[0] = a;
      target[1] = b;
    } else {
      u16* target = p.out + batch * p.out_stride_b + token * p.out_stride_s + (first_head + h) * p.out_stride_h + dim;
      *reinterpret_cast<u32*>(target) = ptx::pack_bf16(a, b);
    }
  }
};

}  // namespace sparse_decode
