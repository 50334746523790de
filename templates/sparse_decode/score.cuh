// The warps that compute scores and softmax.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Shared, class Encoding, class ExtraEncoding, class Params>
struct ScoreWarp {
  static constexpr int kTileStages = C::kTileTokens / C::kStageTokens;
  static constexpr int kStageBlocks = C::kStageTokens / 16;
  static constexpr int kRows = C::kWarpBlocks;  // blocks of 16 tokens of one warp, all of one stage
  static constexpr int kBlockGroups = C::kTileTokens / 16 / kRows;
  static constexpr int kHeadTiles = C::kHeads / 8;
  static constexpr int kHeadShares = C::kScoreWarps / kBlockGroups;  // warps among which head tiles are dealt
  static constexpr int kTiles = (kHeadTiles + kHeadShares - 1) / kHeadShares;
  static constexpr bool kEvenShares = kHeadTiles % kHeadShares == 0;
  static constexpr int kThreads = C::kScoreWarps * 32;
  static_assert(C::kTileTokens % C::kStageTokens == 0 && kStageBlocks % kRows == 0 && C::kScoreWarps % kBlockGroups == 0);
  static_assert(kThreads >= C::kHeads, "one thread per head finishes the softmax");
  static_assert(Encoding::kOutputScale == ExtraEncoding::kOutputScale && Encoding::kNormaliseQuery == ExtraEncoding::kNormaliseQuery);

  const Params& p;
  Shared& shared;
  const Work<C, Params>& work;
  const int warp, lane;
  int group, tile_begin, tile_count;  // which token blocks, which head tiles
  float sum[kTiles][2];  // per head column of this lane

  DSA_DEVICE ScoreWarp(const Params& params, Shared& storage, const Work<C, Params>& item, int warp_, int lane_)
      : p(params), shared(storage), work(item), warp(warp_), lane(lane_) {
    group = warp % kBlockGroups;
    const int share = warp / kBlockGroups;
    tile_begin = share * kHeadTiles / kHeadShares;
    tile_count = (share + 1) * kHeadTiles / kHeadShares - tile_begin;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[j][e] = 0.0f;
  }

  DSA_DEVICE void run() {
    int slot = 0, buffer = 0;  // of the tile
    u32 parity = 0, round = 0;
    if constexpr (kSameType<Encoding, ExtraEncoding>) {
      run<Encoding>(slot, parity, buffer, round, 0, work.tiles);
    } else {
      run<Encoding>(slot, parity, buffer, round, 0, work.main_tiles);
      run<ExtraEncoding>(slot, parity, buffer, round, work.main_tiles, work.tiles);
    }
    finish();
  }

 private:
  static DSA_DEVICE void sync() { ptx::barrier_sync(1, kThreads); }

  // Tiles begin .. end - 1 of this split, all of one encoding.
  template <class E>
  DSA_DEVICE void run(int& slot, u32& parity, int& buffer, u32& round, int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      tile<E>(slot, parity, buffer, round);
#pragma unroll
      for (int stage = 0; stage < kTileStages; ++stage) {
        ptx::mbarrier_arrive(ptx::shared_address(&shared.freed[slot]));
        advance_ring<C::kStages>(slot, parity, 1);
      }
      if (++buffer == C::kProbabilityBuffers) buffer = 0, ++round;
    }
  }

  // Whether head tile j of this warp's share exists.
  DSA_DEVICE bool has_tile(int j) const { return kEvenShares || j < tile_count; }

  // Head column of element e (0, 1) of this lane in head tile j of this warp's share.
  DSA_DEVICE int column(int j, int e) const { return (tile_begin + j) * 8 + 2 * (lane % 4) + e; }

  template <class E>
  DSA_DEVICE void tile(int slot, u32 parity, int buffer, u32 round) {
    advance_ring<C::kStages>(slot, parity, group * kRows / kStageBlocks);
    ptx::mbarrier_wait(ptx::shared_address(&shared.landed[slot]), parity);
    const int token = group * kRows % kStageBlocks * 16;  // within the stage
    const u32 rows = ptx::shared_address(&shared.rows[slot][0][0]) + token * E::Row::kRowPitchBytes;
    const u32 valid = shared.valid[slot] >> token;  // bit t: the warp's token t
    const bool live = (valid & (kRows == 1 ? 0xffffu : 0xffffffffu)) != 0;
    float s[kRows][kTiles][4] = {};
    if (live) score<E>(s, rows, valid);
    const bool raise = ptx::barrier_any(1, kThreads, live && outgrown(s));  // B
    // Round r waits for phase r - 1; in round 0 the phase before the first counts as complete.
    ptx::mbarrier_wait(ptx::shared_address(&shared.drained[buffer]), (round & 1) ^ 1);
    if (warp == 0 && lane == 0) shared.raised[buffer] = raise;
    if (raise) raise_reference(s, live, buffer);
    if (live) store_probabilities<E>(s, rows, buffer);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.filled[buffer]));
  }

  // Scores in log2 units: S times the logit factor, -inf for invalid tokens (whose rows are zeros).
  template <class E>
  DSA_DEVICE void score(float (&s)[kRows][kTiles][4], u32 rows, u32 valid) const {
    const u32 query = query_image<!kSameType<E, Encoding>>(shared) + tile_begin * 8 * C::kQueryPitchBytes;
    if (kEvenShares || tile_count == kTiles) {
      E::score(s, rows, query, lane);
    } else if constexpr (kTiles > 1) {
      float fewer[kRows][kTiles - 1][4] = {};
      E::score(fewer, rows, query, lane);
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int j = 0; j < kTiles - 1; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][j][i] = fewer[m][j][i];
    }
    float mask[kRows][2];
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) mask[m][half] = is_valid(valid, m, half) ? 0.0f : -kInfinity;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const Words4 pair = head_pair(j);
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][j][i] = s[m][j][i] * ptx::float_of(i % 2 == 0 ? pair.x : pair.z) + mask[m][i / 2];
    }
  }

  // Logit factor and reference of this lane's two head columns in head tile j: factor, reference, factor, reference.
  DSA_DEVICE Words4 head_pair(int j) const {
    return ptx::load_shared_16(ptx::shared_address(&shared.head_scale[has_tile(j) ? column(j, 0) : 0][0]));
  }

  // Whether this lane's row of block m and half (row lane / 4 or that + 8) is valid.
  DSA_DEVICE bool is_valid(u32 valid, int m, int half) const { return valid >> (16 * m + 8 * half + lane / 4) & 1; }

  // Whether a score exceeds its reference by more than the threshold.
  DSA_DEVICE bool outgrown(const float (&s)[kRows][kTiles][4]) const {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const Words4 pair = head_pair(j);
      const float limit[2] = {ptx::float_of(pair.y) + C::kLazyThreshold, ptx::float_of(pair.w) + C::kLazyThreshold};
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) any |= has_tile(j) && s[m][j][i] > limit[i % 2];
    }
    return any;
  }

  // P = 2^(s - M) of valid tokens, 0 of others: added to the sums and written as 16-bit copies, one per scale group
  // where the encoding folds scales into them.
  template <class E>
  DSA_DEVICE void store_probabilities(float (&s)[kRows][kTiles][4], u32 rows, int buffer) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const Words4 pair = head_pair(j);
#pragma unroll
      for (int m = 0; m < kRows; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = s[m][j][i] - ptx::float_of(i % 2 == 0 ? pair.y : pair.w);
          s[m][j][i] = ptx::exp2_approx(x);  // 0 for -inf
          sum[j][i % 2] += s[m][j][i];
        }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 row = rows + (16 * m + 8 * half + lane / 4) * E::Row::kRowPitchBytes;
        const u32 target = probability_address<C>(ptx::shared_address(shared.probability[buffer]),
                                                  16 * (group * kRows + m) + 8 * half + lane / 4);
#pragma unroll
        for (int copy = 0; copy < E::kProbabilityCopies; ++copy) {
          const float scale = E::scale(row, copy) * E::kProbabilityScale;
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
            if (has_tile(j))
              ptx::store_shared_4(
                  target + copy * kProbabilityBytes<C> + probability_chunk<C>(tile_begin + j, lane / 4) + 4 * (lane % 4),
                  E::pack_probabilities(s[m][j][2 * half] * scale, s[m][j][2 * half + 1] * scale));
        }
      }
  }

  // M becomes the exact maximum so far; the sums shrink here, O in the value warps.
  DSA_DEVICE void raise_reference(const float (&s)[kRows][kTiles][4], bool live, int buffer) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = kNoReference;
#pragma unroll
        for (int m = 0; m < kRows; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (live) top = larger(s[m][j][2 * half + e], top);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) top = larger(top, ptx::float_of(ptx::shuffle_xor(ptx::bits_of(top), mask)));
        if (lane < 4 && has_tile(j)) shared.block_value[group][column(j, e)] = top;
      }
    sync();  // C
    const int h = warp * 32 + lane;
    if (h < C::kHeads) {
      const float before = shared.head_scale[h][1];
      float top = before;
#pragma unroll
      for (int b = 0; b < kBlockGroups; ++b) top = larger(top, shared.block_value[b][h]);
      shared.head_scale[h][1] = top;
      shared.shrink[buffer][h] = ptx::exp2_approx(before - top);
    }
    sync();  // C
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (has_tile(j)) sum[j][e] *= shared.shrink[buffer][column(j, e)];
  }

  // NaN where either is: a score that is not a number must not vanish.
  static DSA_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }

  DSA_DEVICE void finish() {
    sync();  // the last raise may still be reading block_value
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = sum[j][e];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) total += ptx::float_of(ptx::shuffle_xor(ptx::bits_of(total), mask));
        if (lane < 4 && has_tile(j)) shared.block_value[group][column(j, e)] = total;
      }
    sync();
    if (warp * 32 + lane < C::kHeads) finish_head(warp * 32 + lane);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.finished[0]));
  }

  // One thread per head: log-sum-exp, and the output factor (left in head_value).
  DSA_DEVICE void finish_head(int h) {
    float total = 0.0f;
#pragma unroll
    for (int b = 0; b < kBlockGroups; ++b) total += shared.block_value[b][h];
    const bool empty = total == 0.0f;
    const float lse = empty ? -kInfinity : shared.head_scale[h][1] + ptx::log2_approx(total);
    float scale = empty ? 0.0f : Encoding::kOutputScale / total;
    if (h < work.heads(p)) {
      const int head = work.first_head + h;
      if (p.num_splits > 1) {
        p.lse_accum[work.partial_row(p) * p.heads + head] = lse;
      } else {
        if (p.attn_sink != nullptr && !empty) scale /= 1.0f + ptx::exp2_approx(p.attn_sink[head] * kLog2E - lse);
        p.lse[work.batch(p) * p.lse_stride_b + work.token(p) * p.lse_stride_s + head * p.lse_stride_h] =
            empty ? p.empty_lse : lse * p.lse_unit;
      }
    }
    shared.head_value[h] = scale;
  }
};

}  // namespace sparse_decode
