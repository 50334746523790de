// Softmax over scores that warpgroups hold as S^T, tokens by heads: the lazy reference, the sums, and their end.
#pragma once
#include "prims/ptx/barrier_arrive.cuh"
#include "prims/ptx/cluster.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/opaque.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

// One or two groups of four warps, which take tiles in turn. Warp w of a group has the 16 tokens of a tile from 16 w on and all heads. Lane l
// has rows l/4 and l/4 + 8 of them (elements 0, 1 and 2, 3) and the columns 2 (l % 4) and that + 1 of each tile of 8 heads.
//
// Both groups have one reference. A group looks at it, and raises it, in the turn of its tile only, so that the value warps
// meet the references in the order of the tiles. What its sums refer to is kept beside, and they follow in its next turn.
template <class C, class Shared, class Encoding, class Params>
struct Softmax {
  static constexpr int kTiles = C::kHeads / 8;
  static constexpr int kGroupWarps = 4, kGroups = C::kScoreWarps / kGroupWarps, kGroupThreads = kGroupWarps * 32;
  static_assert(C::kScoreWarps % kGroupWarps == 0 && (kGroups == 1 || kGroups == 2));
  static_assert(kGroupThreads >= C::kHeads, "one thread per head finishes the softmax");
  // Barriers of the CTA: all score warps; the turn of group 0, of group 1; those of a group alone.
  static constexpr int kAll = 1, kTurn = 4, kOwn = 6;

  const Params& p;
  Shared& shared;
  const Work<C, Params>& work;
  const int group, warp;  // warp of the group
  int lane;
  float sum[kTiles][2], reference[kTiles][2];  // per head column of this lane; the reference from a turn on to the end of its tile

  DSA_DEVICE Softmax(const Params& params, Shared& storage, const Work<C, Params>& item, int warp_, int lane_)
      : p(params), shared(storage), work(item), group(warp_ / kGroupWarps), warp(warp_ % kGroupWarps), lane(lane_), sum{} {}

  DSA_DEVICE void sync() const { ptx::barrier_sync(kOwn + group, kGroupThreads); }

  // Waits until the tile before `tile` is done with the reference.
  DSA_DEVICE void await_turn(int tile) const {
    if (kGroups > 1 && tile > 0) ptx::barrier_sync(kTurn + group, kGroups * kGroupThreads);
  }

  DSA_DEVICE void end_turn(int tile) const {
    if (kGroups > 1 && tile + 1 < work.tiles) ptx::barrier_arrive(kTurn + 1 - group, kGroups * kGroupThreads);
  }

  // Head column of element e (0, 1) of this lane in head tile j.
  DSA_DEVICE int column(int j, int e) const { return j * 8 + 2 * (lane % 4) + e; }

  // Before the first tile, by the first kHeads threads of the CTA.
  static DSA_DEVICE void init_reference(Shared& shared, int thread) {
    if (thread < C::kHeads) {
      shared.reference[thread] = kNoReference;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) shared.followed[g][thread] = kNoReference;
    }
  }

  // Scores in log2 units: S times the logit factor, -inf for tokens whose bit in `valid` is not set, or all where the warp's
  // rows are not `live` and hold anything.
  DSA_DEVICE void mask(float (&s)[kTiles][4], bool live, u32 valid) const {
    const bool rows[2] = {live && (valid >> (lane / 4) & 1), live && (valid >> (lane / 4 + 8) & 1)};
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const Words4 pair = ptx::load_shared_16(ptx::shared_address(&shared.head_scale[column(j, 0)][0]));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[j][i] = rows[i / 2] ? s[j][i] * ptx::float_of(i % 2 == 0 ? pair.x : pair.z) : -kInfinity;
    }
  }

  // The reference as it is now; the sums follow it. The group meets before note_followed.
  DSA_DEVICE void take_reference() {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        reference[j][e] = shared.reference[column(j, e)];
        if constexpr (kGroups > 1) {
          const float before = shared.followed[group][column(j, e)];
          if (before != reference[j][e]) sum[j][e] *= ptx::exp2_approx(before - reference[j][e]);
        }
      }
  }

  // The group's sums refer to the reference as it is now.
  DSA_DEVICE void note_followed() const {
    const int h = warp * 32 + lane;
    if (kGroups > 1 && h < C::kHeads) shared.followed[group][h] = shared.reference[h];
  }

  // Whether a score exceeds its reference by more than the threshold.
  DSA_DEVICE bool outgrown(const float (&s)[kTiles][4]) const {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) any |= s[j][i] > reference[j][i % 2] + C::kLazyThreshold;
    return any;
  }

  // s = P = 2^(s - M), 0 for -inf, added to the sums.
  DSA_DEVICE void exponentiate(float (&s)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[j][i] = ptx::exp2_approx(s[j][i] - reference[j][i % 2]);
        sum[j][i % 2] += s[j][i];
      }
  }

  // M becomes the exact maximum so far; the sums shrink here, O in the value warps.
  DSA_DEVICE void raise_reference(const float (&s)[kTiles][4], bool live, int buffer) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = kNoReference;
        if (live) top = larger(s[j][2 + e], larger(s[j][e], top));
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) top = larger(top, ptx::float_of(ptx::shuffle_xor(ptx::bits_of(top), mask)));
        if (lane < 4) shared.block_value[warp][column(j, e)] = top;
      }
    sync();  // C
    const int h = warp * 32 + lane;
    if (h < C::kHeads) {
      const float before = shared.reference[h];
      float top = before;
#pragma unroll
      for (int b = 0; b < kGroupWarps; ++b) top = larger(top, shared.block_value[b][h]);
      shared.reference[h] = top;
      shared.shrink[buffer][h] = ptx::exp2_approx(before - top);
    }
    sync();  // C
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        reference[j][e] = shared.reference[column(j, e)];
        sum[j][e] *= shared.shrink[buffer][column(j, e)];
      }
  }

  // NaN where either is: a score that is not a number must not vanish.
  static DSA_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }

  // Sums over all warps, the log-sum-exps, and the output factors in head_value.
  DSA_DEVICE void finish() {
    ptx::barrier_sync(kAll, kGroups * kGroupThreads);  // the reference is the last one, and no raise reads block_value any more
    take_reference();
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = sum[j][e];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) total += ptx::float_of(ptx::shuffle_xor(ptx::bits_of(total), mask));
        if (lane < 4) shared.block_value[group * kGroupWarps + warp][column(j, e)] = total;
      }
    ptx::barrier_sync(kAll, kGroups * kGroupThreads);
    if (ptx::opaque(group) != 0) return;  // else the warp's number would be kept over all tiles, in a register of theirs
    if (warp * 32 + lane < C::kHeads) finish_head(warp * 32 + lane);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.finished[0]));
  }

 private:
  // One thread per head.
  DSA_DEVICE void finish_head(int h) {
    float total = 0.0f;
#pragma unroll
    for (int b = 0; b < C::kScoreWarps; ++b) total += shared.block_value[b][h];
    const bool empty = total == 0.0f;
    const float lse = empty ? -kInfinity : shared.reference[h] + ptx::log2_approx(total);
    float scale = empty ? 0.0f : Encoding::kOutputScale / total;
    const Work<C, Params> item(p);  // anew: kept over all tiles it would take registers of theirs
    if (h < item.heads(p)) {
      const int head = item.first_head + h;
      if (ptx::cluster_blocks() > 1) {
        shared.reference[h] = lse;  // for the value warps, which put it where the cluster's splits read it
      } else if (p.num_splits > 1) {
        p.lse_accum[item.partial_row(p) * p.heads + head] = lse;
      } else {
        if (p.attn_sink != nullptr && !empty) scale /= 1.0f + ptx::exp2_approx(p.attn_sink[head] * kLog2E - lse);
        p.lse[item.batch(p) * p.lse_stride_b + item.token(p) * p.lse_stride_s + head * p.lse_stride_h] =
            empty ? p.empty_lse : lse * p.lse_unit;
      }
    }
    shared.head_value[h] = scale;
  }
};

}  // namespace sparse_decode
