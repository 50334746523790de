// Copies one stage of scattered KV rows by one or several warps, each a share of the rows, one bulk copy a row (sm_90+).
#pragma once
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/row_part.cuh"
#include "prims/tile/rows.cuh"

namespace tile {

template <class C, int kWarps>
struct SharedRowCopy {
  using Part = RowPart<C>;
  static constexpr int kShare = C::kStageTokens / kWarps;  // rows of a warp
  // Of each warp: the lanes that have a row of its share, for what they stored themselves; again where they copy a short part;
  // and the lane that issues the copies.
  static constexpr int kArrivals = kWarps * ((Part::kIsShort ? 2 : 1) * kShare + 1);
  // Bytes that bulk copies bring, and those of a row in shared memory.
  static constexpr int kBulkBytes = C::kRowBytes + (Part::kIsLong ? C::kPartBytes : 0);
  static constexpr u32 kScratchBytes = 8 * kShare;
  static_assert(C::kRowBytes % 16 == 0 && C::kRowPitchBytes % 16 == 0 && C::kStageTokens == 32);
  static_assert(kShare * kWarps == 32 && kShare % 8 == 0);
  static_assert(!Part::kIsLong || C::kPartOffsetBytes == C::kRowBytes);

  static DSA_DEVICE void fence_init() { ptx::fence_mbarrier_init(); }

  // Starts filling share `warp` of the stage at `rows`: lane l of every warp passes the address of row l, and of its second
  // part where there is one. Rows that are not in `mask` are zeros where `wanted` has them, and nothing is read for them.
  // Completes on `landed`, with the other shares. `scratch`: kScratchBytes of the warp's own for each address of a row.
  static DSA_DEVICE void start(u32 rows, u64 address, u64 part, u32 mask, u32 wanted, u32 landed, u32 scratch, int warp, int lane) {
    const u32 first = warp * kShare, share = 0xffffffffu >> (32 - kShare), own = mask >> first & share;
    if (static_cast<u32>(lane) - first < static_cast<u32>(kShare)) {
      if constexpr (Part::kIsShort) {
        Part::copy(rows, part, mask, wanted, lane);
        ptx::mbarrier_arrive_after_copies(landed);
      }
      if ((wanted & ~mask) >> lane & 1) zero_row(rows + lane * C::kRowPitchBytes);
      ptx::mbarrier_arrive(landed);
      ptx::store_shared_8(scratch + 8 * (lane - first), address);
      if constexpr (Part::kIsLong) ptx::store_shared_8(scratch + kScratchBytes + 8 * (lane - first), part);
    }
    ptx::warp_sync();
    if (ptx::elect_one()) {
      ptx::fence_proxy_async();  // rows that were zeroed here in an earlier round
      ptx::mbarrier_arrive_expect(landed, ptx::count_ones(own) * kBulkBytes);
      const u32 target = rows + first * C::kRowPitchBytes;
      if (own == share) {
        copy_all<C::kRowBytes>(target, scratch, landed);
        if constexpr (Part::kIsLong) copy_all<C::kPartBytes>(target + C::kPartOffsetBytes, scratch + kScratchBytes, landed);
      } else if (own != 0) {
        copy_some<C::kRowBytes>(target, scratch, own, landed);
        if constexpr (Part::kIsLong) copy_some<C::kPartBytes>(target + C::kPartOffsetBytes, scratch + kScratchBytes, own, landed);
      }
    }
    ptx::warp_sync();
  }

 private:
  // Eight addresses are asked for before the first is used.
  template <int kBytes>
  static DSA_DEVICE void copy_all(u32 target, u32 scratch, u32 landed) {
#pragma unroll 1
    for (int row = 0; row < kShare; row += 8) {
      Words4 two[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) two[i] = ptx::load_shared_16(scratch + 8 * row + 16 * i);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy<kBytes>(target + (row + 2 * i) * C::kRowPitchBytes, two[i].x, two[i].y, landed);
        copy<kBytes>(target + (row + 2 * i + 1) * C::kRowPitchBytes, two[i].z, two[i].w, landed);
      }
    }
  }

  template <int kBytes>
  static DSA_DEVICE void copy_some(u32 target, u32 scratch, u32 own, u32 landed) {
#pragma unroll 1
    for (int row = 0; row < kShare; row += 2) {
      const Words4 two = ptx::load_shared_16(scratch + 8 * row);
      if (own >> row & 1) copy<kBytes>(target + row * C::kRowPitchBytes, two.x, two.y, landed);
      if (own >> row & 2) copy<kBytes>(target + (row + 1) * C::kRowPitchBytes, two.z, two.w, landed);
    }
  }

  template <int kBytes>
  static DSA_DEVICE void copy(u32 target, u32 low, u32 high, u32 landed) {
    ptx::copy_bulk(target, reinterpret_cast<const void*>(static_cast<u64>(high) << 32 | low), kBytes, landed);
  }

  // Stale bytes may decode to NaN, and 0 x NaN would poison the output.
  static DSA_DEVICE void zero_row(u32 row) {
#pragma unroll 4
    for (int byte = 0; byte < kBulkBytes; byte += 16) ptx::store_shared_16(row + byte, Words4{0, 0, 0, 0});
  }
};

}  // namespace tile
