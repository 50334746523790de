// Copies one stage of scattered KV rows by a warp, one bulk copy a row (sm_90+). The copy engine writes shared memory beside
// the load/store pipe, which 16-byte copies would share with the matrix loads.
#pragma once
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/row_part.cuh"
#include "prims/tile/rows.cuh"

namespace tile {

template <class C>
struct RowCopy {
  using Part = RowPart<C>;
  // Each lane, for what it stored itself, and the lane that issues the copies; each lane again where it copies a short part.
  // A lane could arrive for the others after warp_sync, but tools that look for races take an arrival for what its own
  // thread did only.
  static constexpr int kArrivals = Part::kIsShort ? 65 : 33;
  // Bytes that bulk copies bring, and those of a row in shared memory.
  static constexpr int kBulkBytes = C::kRowBytes + (Part::kIsLong ? C::kPartBytes : 0);
  static_assert(C::kRowBytes % 16 == 0 && C::kRowPitchBytes % 16 == 0 && C::kStageTokens == 32);
  static_assert(!Part::kIsLong || C::kPartOffsetBytes == C::kRowBytes);

  static DSA_DEVICE void fence_init() { ptx::fence_mbarrier_init(); }

  // Starts filling the stage at `rows`: lane l passes the address of row l, and of its second part where there is one. Rows
  // that are not in `mask` are zeros where `wanted` has them, and nothing is read for them. Completes on `landed`.
  // `scratch` is 256 B of the warp's own for each address of a row: one lane issues all bulk copies (copies issued by many
  // lanes serialise), and takes the addresses from there.
  static DSA_DEVICE void start(u32 rows, u64 address, u64 part, u32 mask, u32 wanted, u32 landed, u32 scratch, int lane) {
    if constexpr (Part::kIsShort) {
      Part::copy(rows, part, mask, wanted, lane);
      ptx::mbarrier_arrive_after_copies(landed);
    }
    if ((wanted & ~mask) != 0) zero_rows(rows, wanted & ~mask, lane);
    ptx::mbarrier_arrive(landed);
    ptx::store_shared_8(scratch + 8 * lane, address);
    if constexpr (Part::kIsLong) ptx::store_shared_8(scratch + 256 + 8 * lane, part);
    ptx::warp_sync();
    if (ptx::elect_one()) {
      ptx::fence_proxy_async();  // rows that were zeroed here in an earlier round
      ptx::mbarrier_arrive_expect(landed, ptx::count_ones(mask) * kBulkBytes);
#pragma unroll 4
      for (int row = 0; row < C::kStageTokens; row += 2) {
        const Words4 two = ptx::load_shared_16(scratch + 8 * row);
        if (mask >> row & 1) copy(rows + row * C::kRowPitchBytes, two.x, two.y, C::kRowBytes, landed);
        if (mask >> row & 2) copy(rows + (row + 1) * C::kRowPitchBytes, two.z, two.w, C::kRowBytes, landed);
        if constexpr (Part::kIsLong) {
          const Words4 parts = ptx::load_shared_16(scratch + 256 + 8 * row);
          const u32 target = rows + row * C::kRowPitchBytes + C::kPartOffsetBytes;
          if (mask >> row & 1) copy(target, parts.x, parts.y, C::kPartBytes, landed);
          if (mask >> row & 2) copy(target + C::kRowPitchBytes, parts.z, parts.w, C::kPartBytes, landed);
        }
      }
    }
    ptx::warp_sync();
  }

 private:
  static DSA_DEVICE void copy(u32 target, u32 low, u32 high, u32 bytes, u32 landed) {
    ptx::copy_bulk(target, reinterpret_cast<const void*>(static_cast<u64>(high) << 32 | low), bytes, landed);
  }

  // Stale bytes may decode to NaN, and 0 x NaN would poison the output.
  static DSA_DEVICE void zero_rows(u32 rows, u32 mask, int lane) {
#pragma unroll 1
    for (int row = 0; row < C::kStageTokens; ++row)
      if (mask >> row & 1)
        for (int byte = lane * 16; byte < kBulkBytes; byte += 512)
          ptx::store_shared_16(rows + row * C::kRowPitchBytes + byte, Words4{0, 0, 0, 0});
  }
};

}  // namespace tile
