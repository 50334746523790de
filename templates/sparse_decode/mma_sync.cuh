// Sparse MLA decode for every arch: mma.sync on raw cache rows gathered by asynchronous copies. One CTA handles one
// query token, one group of up to kHeads heads and one split of the index row.
//
// Swapped form: S^T[tokens x heads] = K Q^T, then O^T[dims x heads] = V^T P^T, so heads are the narrow MMA dimension and
// are padded to a multiple of 8 only.
//
// The CTA is kTeams teams of kWarps warps. A team owns every kTeams-th tile of the split, a ring of stages and a buffer of
// probabilities; teams share nothing but the query until their results are merged at the end, so that one team's
// tensor-core phase runs beside another's conversions and loads. Inside a team:
//
//   warp w               scores:  tokens 16 (w % kRowBlocks) .., a share of the head tiles      (S in registers)
//                        values:  dims w kValueDims / kWarps .., all heads                      (O in registers)
//
//   time ->   | wait tile i | A | start tile i+stages-1 | scores, P | B | O += V P | wait tile i+1 | A | ...
//   A: barrier_sync. Every warp's copies of tile i have landed; every warp is done with P and with the stage that the next
//      copies overwrite.
//   B: barrier_any. P is complete; carries whether some score outgrew the softmax reference.
//   Slow path (rare): once more scores -> column maxima -> A' -> raise the reference, P again -> B -> scale O.
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
  static constexpr bool kEvenShares = kHeadTiles % kHeadShares == 0;
  static constexpr int kWarpDims = C::kValueDims / C::kWarps;
  static constexpr int kBlocks = kWarpDims / 16;
  static constexpr int kTeamThreads = C::kWarps * 32;
  static constexpr int kThreads = C::kTeams * kTeamThreads;
  static constexpr int kGatherRows = tile::RowGather<C>::kRows;
  static constexpr int kProbabilityBytes = C::kTileTokens * C::kProbabilityPitchBytes;
  static constexpr int kAccumulateUnroll = kHeadTiles > 4 ? 2 : kRowBlocks;  // more would spill
  static constexpr int kQueryChunks = (C::kNopeDims + C::kRopeDims) / 8;
  static constexpr int kOutputRegisters = kBlocks * kHeadTiles * 4;
  static_assert(C::kTileTokens % 16 == 0 && C::kWarps % kRowBlocks == 0 && kWarpDims % 32 == 0 && C::kHeads % 8 == 0);
  static_assert(C::kValueDims / Encoding::kProbabilityCopies % kWarpDims == 0, "a warp's dims share one probability copy");
  static_assert(sizeof(Shared::rows) >= (C::kTeams - 1) * kOutputRegisters * kTeamThreads * 4, "teams merge through the rows");
  static_assert(kThreads >= C::kHeads, "one thread per head finishes the softmax");

  const Params& p;
  Shared& shared;
  int team, warp, lane;  // warp within its team
  // Work of this CTA and team.
  u32 row, split;  // query token batch x s_q + s, and which split of its index row
  int first_head;
  int length, tiles;  // live columns of the index row; tiles of this team
  const i32* indices;
  // Scores side: this warp's head tiles, and per column pair of a tile the softmax reference and the partial sum.
  int row_block, tile_begin, tile_count;
  float reference[kShareTiles][2], sum[kShareTiles][2];
  float output[kBlocks][kHeadTiles][4];

  DSA_DEVICE MmaSync(const Params& params, Shared& storage) : p(params), shared(storage), output{} {
    const int cta_warp = static_cast<int>(ptx::shuffle(ptx::thread_index() / 32, 0));
    team = cta_warp / C::kWarps;
    warp = cta_warp % C::kWarps;
    lane = ptx::thread_index() % 32;
    u32 item = ptx::block_index();
    const int group = item % p.head_groups;
    item /= p.head_groups;
    split = item % p.num_splits;
    row = item / p.num_splits;
    first_head = group * p.group_heads;
    length = p.topk;
    if (p.topk_length != nullptr) {
      const int given = p.topk_length[batch() * p.length_stride_b + token() * p.length_stride_s];
      length = given < 0 ? 0 : given < length ? given : length;
    }
    const int all_tiles = (length + C::kTileTokens - 1) / C::kTileTokens;
    const int first = static_cast<int>(split) + team * p.num_splits;  // tiles first, first + kTeams * num_splits, ...
    tiles = first < all_tiles ? (all_tiles - first - 1) / (C::kTeams * p.num_splits) + 1 : 0;
    indices = p.indices + batch() * p.indices_stride_b + token() * p.indices_stride_s;
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
    ptx::barrier_sync(0, kThreads);
    int stage = 0;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      ptx::copy_async_wait<C::kStages - 2>();
      team_sync();  // A
      const int refill = stage == 0 ? C::kStages - 1 : stage - 1;
      if (i + C::kStages - 1 < tiles) start_tile(gather, refill, next_id);
      ptx::copy_async_commit();
      next_id = load_id(i + C::kStages);
      if (any_valid(stage)) process(stage);
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
    }
    finish();
  }

 private:
  DSA_DEVICE i64 batch() const { return row / static_cast<u32>(p.s_q); }
  DSA_DEVICE i64 token() const { return row % static_cast<u32>(p.s_q); }
  DSA_DEVICE int heads() const { return p.heads - first_head < p.group_heads ? p.heads - first_head : p.group_heads; }
  DSA_DEVICE i64 partial_row() const { return static_cast<i64>(row) * p.num_splits + split; }
  DSA_DEVICE void team_sync() const { ptx::barrier_sync(1 + team, kTeamThreads); }

  // ---- gather -------------------------------------------------------------------------------------------------------

  // Id of this lane's row in this team's i-th tile, -1 where there is none.
  DSA_DEVICE i32 load_id(int i) const {
    const i64 tile = (static_cast<i64>(i) * C::kTeams + team) * p.num_splits + split;
    const i64 column = tile * C::kTileTokens + warp * kGatherRows + lane;
    return lane < kGatherRows && column < length ? indices[column] : -1;
  }

  DSA_DEVICE void start_tile(const tile::RowGather<C>& gather, int stage, i32 id) {
    const u32 mask = gather.start(rows_of(stage) + warp * kGatherRows * C::kRowPitchBytes, id, lane);
    if (lane == 0) shared.valid[team][stage][warp] = mask;
  }

  DSA_DEVICE u32 rows_of(int stage) const {
    return ptx::shared_address(shared.rows) + (team * C::kStages + stage) * (C::kTileTokens * C::kRowPitchBytes);
  }

  DSA_DEVICE bool any_valid(int stage) const {
    u32 any = 0;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) any |= shared.valid[team][stage][w];
    return any != 0;
  }

  DSA_DEVICE bool valid_row(int stage, int row_in_tile) const {
    return shared.valid[team][stage][row_in_tile / kGatherRows] >> (row_in_tile % kGatherRows) & 1;
  }

  // ---- query --------------------------------------------------------------------------------------------------------

  // One warp per head row: bf16 global -> query image. Where the encoding asks for it each row is scaled by a power of
  // two that brings its largest element to [2^14, 2^15), so that f16 keeps every element exactly (those 2^-29 below the
  // largest excepted); the inverse goes into the logit factor. Heads past the group's end become zero rows.
  DSA_DEVICE void stage_query() {
    const u32 image = ptx::shared_address(shared.query);
#pragma unroll 1
    for (int h = team * C::kWarps + warp; h < C::kHeads; h += C::kTeams * C::kWarps) {
      const bool live = h < heads();
      const u16* source = p.q + batch() * p.q_stride_b + token() * p.q_stride_s + (first_head + h) * p.q_stride_h;
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

  // Whether head tile j of this warp's share exists.
  DSA_DEVICE bool has_tile(int j) const { return kEvenShares || j < tile_count; }

  // Head column of element e (0, 1) of this lane in head tile j of this warp's share.
  DSA_DEVICE int column(int j, int e) const { return (tile_begin + j) * 8 + 2 * (lane % 4) + e; }

  // ---- one tile -----------------------------------------------------------------------------------------------------

  DSA_DEVICE void process(int stage) {
    const u32 rows = rows_of(stage);
    const int low = row_block * 16 + lane / 4;
    const bool valid[2] = {valid_row(stage, low), valid_row(stage, low + 8)};
    // At most two rounds: after a raise no score exceeds its reference. One copy of the code serves both.
#pragma unroll 1
    for (bool raise = false;; raise = true) {
      float s[kShareTiles][4] = {}, before[kShareTiles][2];
      score(s, rows);
      if (raise) raise_reference(s, valid);
      copy(before, sum);
      const bool outgrown = store_probabilities(s, valid, rows);
      const bool again = ptx::barrier_any(1 + team, kTeamThreads, outgrown);  // B
      if (raise) shrink_output();
      if (!again) break;
      copy(sum, before);
    }
    accumulate(rows);
  }

  static DSA_DEVICE void copy(float (&to)[kShareTiles][2], const float (&from)[kShareTiles][2]) {
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) to[j][e] = from[j][e];
  }

  // Scores in log2 units: S times the logit factor.
  DSA_DEVICE void score(float (&s)[kShareTiles][4], u32 rows) const {
    const u32 block = rows + row_block * 16 * C::kRowPitchBytes;
    const u32 query = ptx::shared_address(shared.query) + tile_begin * 8 * C::kQueryPitchBytes;
    if (kEvenShares || tile_count == kShareTiles) {
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
      for (int e = 0; e < 2; ++e) {
        const float factor = has_tile(j) ? shared.query_factor[column(j, e)] : 0.0f;
        s[j][e] *= factor;
        s[j][e + 2] *= factor;
      }
  }

  // s becomes P = 2^(s - M) for valid tokens, 0 for others: added to the sums and written as bf16 copies, one per scale
  // group. Returns whether a score outgrew its reference.
  DSA_DEVICE bool store_probabilities(float (&s)[kShareTiles][4], const bool (&valid)[2], u32 rows) {
    bool outgrown = false;
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[j][i] - reference[j][i % 2];
        outgrown |= valid[i / 2] && has_tile(j) && x > C::kLazyThreshold;
        s[j][i] = valid[i / 2] ? ptx::exp2_approx(x) : 0.0f;
        sum[j][i % 2] += s[j][i];
      }
    const int low = row_block * 16 + lane / 4;
    const u32 target = probability() + low * C::kProbabilityPitchBytes + 2 * column(0, 0);
#pragma unroll
    for (int copy = 0; copy < Encoding::kProbabilityCopies; ++copy) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 row_address = rows + (low + 8 * half) * C::kRowPitchBytes;
        const float scale = valid[half] ? Encoding::scale(row_address, copy) * Encoding::kProbabilityScale : 0.0f;
#pragma unroll
        for (int j = 0; j < kShareTiles; ++j)
          if (has_tile(j))
            ptx::store_shared_4(target + copy * kProbabilityBytes + 8 * half * C::kProbabilityPitchBytes + 16 * j,
                                ptx::pack_bf16(s[j][2 * half] * scale, s[j][2 * half + 1] * scale));
      }
    }
    return outgrown;
  }

  DSA_DEVICE u32 probability() const {
    return ptx::shared_address(shared.probability) + team * Encoding::kProbabilityCopies * kProbabilityBytes;
  }

  // Slow path: M becomes the exact maximum so far; the sums shrink here, the outputs in shrink_output.
  DSA_DEVICE void raise_reference(const float (&s)[kShareTiles][4], const bool (&valid)[2]) {
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = larger(valid[0] ? s[j][e] : kNoReference, valid[1] ? s[j][e + 2] : kNoReference);
        top = over_rows_max(top);
        if (lane < 4 && has_tile(j)) shared.block_value[team][row_block][column(j, e)] = top;
      }
    team_sync();  // A'
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!has_tile(j)) continue;
        float top = reference[j][e];
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) top = larger(top, shared.block_value[team][b][column(j, e)]);
        const float shrink = ptx::exp2_approx(reference[j][e] - top);
        reference[j][e] = top;
        sum[j][e] *= shrink;
        if (lane < 4 && row_block == 0) shared.head_value[team][column(j, e)] = shrink;
      }
  }

  DSA_DEVICE void shrink_output() {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float shrink = shared.head_value[team][8 * t + 2 * (lane % 4) + e];
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
    const u32 block_row = probability() + first_dim / kCopyDims * kProbabilityBytes + lane % 16 * C::kProbabilityPitchBytes;
#pragma unroll kAccumulateUnroll
    for (int k = 0; k < kRowBlocks; ++k) {
      u32 b[kHeadTiles][2];
#pragma unroll
      for (int t = 0; t + 1 < kHeadTiles; t += 2) {
        const Words4 w = ptx::load_matrix_x4_trans(block_row + lane / 16 * 16 + k * 16 * C::kProbabilityPitchBytes + t * 16);
        b[t][0] = w.x, b[t][1] = w.y, b[t + 1][0] = w.z, b[t + 1][1] = w.w;
      }
      if constexpr (kHeadTiles % 2 != 0) {
        constexpr int t = kHeadTiles - 1;
        ptx::load_matrix_x2_trans(b[t][0], b[t][1], block_row + k * 16 * C::kProbabilityPitchBytes + t * 16);
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
    ptx::copy_async_wait<0>();
    team_sync();  // the slow path of the last tile may still be reading head_value
#pragma unroll
    for (int j = 0; j < kShareTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float total = over_rows_sum(sum[j][e]);
        if (lane < 4 && has_tile(j)) {
          shared.block_value[team][row_block][column(j, e)] = total;
          if (row_block == 0) shared.head_value[team][column(j, e)] = reference[j][e];
        }
      }
    ptx::barrier_sync(0, kThreads);
    if (ptx::thread_index() < C::kHeads) finish_head(ptx::thread_index());
    ptx::barrier_sync(0, kThreads);
    scale_output();
    if constexpr (C::kTeams > 1) {
      if (team > 0) hand_over();
      ptx::barrier_sync(0, kThreads);
      if (team > 0) return;
      take_over();
    }
    write_output();
  }

  // One thread per head: log-sum-exp over the teams, and each team's output factor (left in head_value).
  DSA_DEVICE void finish_head(int h) {
    float totals[C::kTeams], top = kNoReference, total = 0.0f;
#pragma unroll
    for (int t = 0; t < C::kTeams; ++t) {
      totals[t] = 0.0f;
#pragma unroll
      for (int b = 0; b < kRowBlocks; ++b) totals[t] += shared.block_value[t][b][h];
      top = larger(shared.head_value[t][h], top);
    }
    float factors[C::kTeams];
#pragma unroll
    for (int t = 0; t < C::kTeams; ++t) {
      factors[t] = ptx::exp2_approx(shared.head_value[t][h] - top);
      total += totals[t] * factors[t];
    }
    const bool empty = total == 0.0f;
    const float lse = empty ? -kInfinity : top + ptx::log2_approx(total);
    float scale = empty ? 0.0f : Encoding::kOutputScale / total;
    if (h < heads()) {
      if (p.num_splits > 1) {
        p.lse_accum[partial_row() * p.heads + first_head + h] = lse;
      } else {
        if (p.attn_sink != nullptr && !empty) scale /= 1.0f + ptx::exp2_approx(p.attn_sink[first_head + h] * kLog2E - lse);
        p.lse[batch() * p.lse_stride_b + token() * p.lse_stride_s + (first_head + h) * p.lse_stride_h] =
            empty ? p.empty_lse : lse * p.lse_unit;
      }
    }
#pragma unroll
    for (int t = 0; t < C::kTeams; ++t) shared.head_value[t][h] = factors[t] * scale;
  }

  DSA_DEVICE void scale_output() {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = shared.head_value[team][8 * t + 2 * (lane % 4) + e];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) output[block][t][e] *= factor, output[block][t][e + 2] *= factor;
      }
  }

  // Teams other than the first leave their scaled outputs where the rows were, one word per thread and register.
  DSA_DEVICE u32 merge_address(int from_team) const {
    const u32 thread = warp * 32 + lane;
    return ptx::shared_address(shared.rows) + ((from_team - 1) * kOutputRegisters * kTeamThreads + thread) * 4;
  }

  DSA_DEVICE void hand_over() const {
    const u32 target = merge_address(team);
#pragma unroll
    for (int i = 0; i < kOutputRegisters; ++i)
      ptx::store_shared_4(target + i * kTeamThreads * 4, ptx::bits_of(output[i / 4 / kHeadTiles][i / 4 % kHeadTiles][i % 4]));
  }

  DSA_DEVICE void take_over() {
#pragma unroll 1
    for (int from = 1; from < C::kTeams; ++from) {
      const u32 source = merge_address(from);
#pragma unroll
      for (int i = 0; i < kOutputRegisters; ++i)
        output[i / 4 / kHeadTiles][i / 4 % kHeadTiles][i % 4] += ptx::float_of(ptx::load_shared_4(source + i * kTeamThreads * 4));
    }
  }

  DSA_DEVICE void write_output() {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
          write_pair(8 * t + 2 * (lane % 4) + e, warp * kWarpDims + block * 16, output[block][t][e], output[block][t][e + 2]);
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
    if (h >= heads()) return;
    if (p.num_splits > 1) {
      float* target = p.o_accum + (partial_row() * p.heads + first_head + h) * C::kValueDims + dim;
      *reinterpret_cast<u64*>(target) = static_cast<u64>(ptx::bits_of(b)) << 32 | ptx::bits_of(a);
    } else {
      u16* target = p.out + batch() * p.out_stride_b + token() * p.out_stride_s + (first_head + h) * p.out_stride_h + dim;
      *reinterpret_cast<u32*>(target) = ptx::pack_bf16(a, b);
    }
  }
};

}  // namespace sparse_decode
