// S^T = K Q^T by warpgroup products of keys that are made in registers, unit by unit.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/ptx/wgmma.cuh"
#include "prims/tile/operand_image.cuh"

namespace kv {

// s[j] = products of kSteps x 16 bf16 dims of the warp's 16 tokens, rows at `rows`, with head tile j of the query image from
// step kFirst on, all in their natural order. They join the next group.
template <class Image, int kFirst, int kSteps, int kPitch, int kTiles>
DSA_DEVICE void start_bf16_scores(float (&s)[kTiles][4], u32 rows, u64 query, int lane) {
  const u32 key = rows + (lane % 16) * kPitch + (lane / 16) * 16;
  u32 a[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const Words4 w = ptx::load_matrix_x4(key + 32 * step);
    a[step][0] = w.x, a[step][1] = w.y, a[step][2] = w.z, a[step][3] = w.w;
  }
  ptx::wgmma_fence();
  ptx::Wgmma<false, kTiles>::bf16(s, a[0], Image::step(query, kFirst));
#pragma unroll
  for (int step = 1; step < kSteps; ++step) ptx::Wgmma<true, kTiles>::bf16(s, a[step], Image::step(query, kFirst + step));
}

// s += scores of the units of `keys`. Each has kSteps k steps, and kJoined in a row have sums of their own, which `add` scales
// and adds; kDepth units are on their way at once, so that the keys of one are made while those before it are multiplied.
// Products into s that were started before and not committed are of the first one's group.
template <class Image, class Keys, int kTiles>
DSA_DEVICE void add_unit_scores(float (&s)[kTiles][4], const Keys& keys, u64 query) {
  constexpr int kDepth = Keys::kDepth, kUnits = Keys::kUnits, kSteps = Keys::kSteps, kJoined = Keys::kJoined;
  constexpr int kSums = (kDepth - 1) / kJoined + (kJoined > 1 ? 2 : 1);
  static_assert(kDepth >= 2 && kUnits >= kDepth && kUnits % kJoined == 0);
  u32 a[kDepth][kSteps][4];
  float acc[kSums][kTiles][4];
  keys.load(a[0], 0);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const int own = unit % kDepth, oldest = unit - (kDepth - 1), group = unit / kJoined, done = oldest / kJoined;
    ptx::wgmma_fence();
    if (unit % kJoined == 0) {
      Keys::template multiply<false>(acc[group % kSums], a[own][0], Image::step(query, kSteps * unit));
    } else {
      Keys::template multiply<true>(acc[group % kSums], a[own][0], Image::step(query, kSteps * unit));
    }
#pragma unroll
    for (int step = 1; step < kSteps; ++step)
      Keys::template multiply<true>(acc[group % kSums], a[own][step], Image::step(query, kSteps * unit + step));
    ptx::wgmma_commit();
    if (oldest >= 0) {
      ptx::wgmma_wait<kDepth - 1>();
      if (oldest == 0) ptx::hold(s);
      if ((oldest + 1) % kJoined == 0) {
        ptx::hold(acc[done % kSums]);
        keys.add(s, acc[done % kSums], done);
      }
    }
    if (unit + 1 < kUnits) keys.load(a[(unit + 1) % kDepth], unit + 1);
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int group = (kUnits - kDepth + 1) / kJoined; group < kUnits / kJoined; ++group) {
    ptx::hold(acc[group % kSums]);
    keys.add(s, acc[group % kSums], group);
  }
}

// As add_unit_scores with one set of sums, for fewer registers: the last unit of a row is awaited before the next row begins, whose
// first keys are made by then.
template <class Image, class Keys, int kTiles>
DSA_DEVICE void add_row_scores(float (&s)[kTiles][4], const Keys& keys, u64 query) {
  constexpr int kUnits = Keys::kUnits, kSteps = Keys::kSteps, kJoined = Keys::kJoined;
  static_assert(kUnits % kJoined == 0 && kJoined >= 2);
  u32 a[2][kSteps][4];
  float acc[kTiles][4];
  keys.load(a[0], 0);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const u64 b = Image::step(query, kSteps * unit + step);
      if (unit % kJoined == 0 && step == 0) {
        Keys::template multiply<false>(acc, a[unit % 2][step], b);
      } else {
        Keys::template multiply<true>(acc, a[unit % 2][step], b);
      }
    }
    ptx::wgmma_commit();
    if (unit % kJoined != 0) ptx::wgmma_wait<1>();  // before the registers of the unit before are made anew
    if (unit + 1 < kUnits) keys.load(a[(unit + 1) % 2], unit + 1);
    if ((unit + 1) % kJoined == 0) {
      ptx::wgmma_wait<0>();
      if (unit + 1 == kJoined) ptx::hold(s);
      ptx::hold(acc);
      keys.add(s, acc, unit / kJoined);
    }
  }
}

// s = scores of the warp's 16 tokens, rows at `rows`: bf16 rotary dims if any, and units that Keys makes and scales.
template <class C, class Image, class Keys, int kTiles>
DSA_DEVICE void scaled_scores(float (&s)[kTiles][4], u32 rows, u64 query, int lane) {
  if constexpr (C::kRopeDims > 0) {
    start_bf16_scores<Image, C::kNopeDims / 16, C::kRopeDims / 16, C::kRowPitchBytes>(s, rows + C::kRopeOffsetBytes, query, lane);
  } else {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
  }
  if constexpr (Keys::kDepth == 1) {
    add_row_scores<Image>(s, Keys(rows, lane), query);
  } else {
    add_unit_scores<Image>(s, Keys(rows, lane), query);
  }
}

// s = scores of the units of `keys`, which need no scales any more.
template <class Image, class Keys, int kTiles>
DSA_DEVICE void plain_unit_scores(float (&s)[kTiles][4], const Keys& keys, u64 query) {
  constexpr int kUnits = Keys::kUnits, kSteps = Keys::kSteps;
  u32 a[2][kSteps][4];
  keys.load(a[0], 0);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    ptx::wgmma_fence();
    if (unit == 0) {
      Keys::template multiply<false>(s, a[0][0], Image::step(query, 0));
    } else {
      Keys::template multiply<true>(s, a[unit % 2][0], Image::step(query, kSteps * unit));
    }
#pragma unroll
    for (int step = 1; step < kSteps; ++step)
      Keys::template multiply<true>(s, a[unit % 2][step], Image::step(query, kSteps * unit + step));
    ptx::wgmma_commit();
    if (unit > 0) ptx::wgmma_wait<1>();  // before its registers are made anew
    if (unit + 1 < kUnits) keys.load(a[(unit + 1) % 2], unit + 1);
  }
  ptx::wgmma_wait<0>();
  ptx::hold(s);
}

}  // namespace kv
