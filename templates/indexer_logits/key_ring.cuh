// A warp's ring of tiles of keys: paged rows of e4m3 codes and their fp32 scales, copied asynchronously.
#pragma once
#include "indexer_logits/query_image.cuh"
#include "indexer_logits/work.cuh"
#include "prims/ptx/copy_group.cuh"
#include "prims/ptx/copy_word.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/rows.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// What a lane keeps of the keys whose scores it stores: key `place(i)` of the tile, its scale, and whether a page holds it.
template <class C>
struct TileKeys {
  static constexpr int kOwn = C::kBlocks / 2;  // 16 kBlocks keys over 8 rows of 4 lanes
  float scale[kOwn];
  bool held[kOwn];

  static DSA_DEVICE int place(int i, int lane) {
    const int n = lane % 4 * kOwn + i;  // among the 2 kBlocks keys of the lane's row
    return n / 2 * 16 + n % 2 * 8 + lane / 4;
  }
};

template <class C, class S, class Keys, class Params>
struct KeyRing {
  using Order = DimOrder<C::kDim>;
  static constexpr int kDim = C::kDim, kTileKeys = C::kTileKeys, kSteps = kDim / 16;
  static constexpr int kLaneKeys = kTileKeys / 32;  // keys whose places a lane finds
  static constexpr u32 kNoPage = 0xffffffffu;

  const Params& p;
  u32 keys, scales, held;  // shared addresses of the warp's ring
  int warp, lane;
  u32 slot = 0;            // next to be filled, which is the next to be taken where all are full

  DSA_DEVICE KeyRing(const Params& params, S& shared, int warp_, int lane_) : p(params), warp(warp_), lane(lane_) {
    keys = ptx::shared_address(&shared.keys[warp][0][0]);
    scales = ptx::shared_address(&shared.scales[warp][0][0]);
    held = ptx::shared_address(&shared.held[warp][0][0]);
  }

  // Starts copying the warp's first tiles of a unit, of `count` tiles from `first` on.
  DSA_DEVICE void start(const Unit& unit, u32 first, u32 count) {
    table = p.block_table + unit.request * p.table_stride;
    const u32 keys_of_span = (first + count) * kTileKeys, all = unit.keys(p);
    end = keys_of_span < all ? keys_of_span : all;
    next = (first + warp) * kTileKeys;
    find_pages();
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) fill();
  }

  // The oldest tile as A operands and what is kept of its keys; its place takes the next tile.
  DSA_DEVICE void take(u32 (&a)[C::kBlocks][kSteps][4], TileKeys<C>& own) {
    ptx::copy_async_wait<C::kStages - 1>();
    ptx::warp_sync();
    const u32 rows = keys + slot * (kTileKeys * kDim);
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 words[kSteps];
        load_row(words, rows, 16 * m + 8 * half + lane / 4);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) Keys::pairs(words[step], a[m][step][half], a[m][step][half + 2]);
      }
#pragma unroll
    for (int i = 0; i < TileKeys<C>::kOwn; ++i) {
      const int key = TileKeys<C>::place(i, lane);
      own.scale[i] = ptx::float_of(ptx::load_shared_4(scales + 4 * (slot * kTileKeys + key))) * (Keys::kCodeScale * Keys::kCodeScale);
      own.held[i] = (ptx::load_shared_4(held + 4 * (slot * kLaneKeys + key / 32)) >> key % 32 & 1) != 0;
    }
    ptx::warp_sync();
    fill();
  }

 private:
  const i32* table;
  u32 end, next;          // of the keys of the span; first key of the tile to fill
  u32 page[kLaneKeys];    // of the lane's keys in that tile

  // Pages of the tile to fill, a tile ahead of their use.
  DSA_DEVICE void find_pages() {
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const u32 key = next + 32 * i + lane;
      page[i] = key < end ? ptx::load_global_4(table + divisor.divide(key)) : kNoPage;
    }
  }

  DSA_DEVICE void fill() {
    if (next < end) copy_tile();
    ptx::copy_async_commit();
    slot = slot + 1 == C::kStages ? 0 : slot + 1;
  }

  DSA_DEVICE void copy_tile() {
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
    u64 address[kLaneKeys];
    u32 valid[kLaneKeys];
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const u32 key = next + 32 * i + lane, offset = key - divisor.divide(key) * p.page_size;
      const bool holds = page[i] < p.pool_pages;
      const u8* base = p.k_cache + (holds ? static_cast<i64>(page[i]) * p.page_stride_bytes : 0);
      const u8* scale = base + static_cast<i64>(p.page_size) * kDim + 4 * static_cast<i64>(offset);
      address[i] = reinterpret_cast<u64>(base + static_cast<i64>(offset) * kDim);
      valid[i] = ptx::ballot(holds);
      ptx::copy_async_4(scales + 4 * (slot * kTileKeys + 32 * i + lane), holds ? scale : p.k_cache, holds ? 4 : 0);
      if (lane == 0) ptx::store_shared_4(held + 4 * (slot * kLaneKeys + i), valid[i]);
    }
    next += C::kWarps * kTileKeys;
    find_pages();
    p.wide_copies != 0 ? copy_rows<16>(address, valid) : copy_rows<4>(address, valid);
  }

  // All rows of the tile, kBytes a lane and copy. A row that no page holds becomes zeros.
  template <int kBytes>
  DSA_DEVICE void copy_rows(const u64 (&address)[kLaneKeys], const u32 (&valid)[kLaneKeys]) const {
    constexpr int kRowLanes = kDim / kBytes, kRowsAtOnce = 32 / kRowLanes;
    static_assert(kRowLanes <= 32 && 32 % kRowsAtOnce == 0);
    const int in_row = lane % kRowLanes;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i)
#pragma unroll 4
      for (int first = 0; first < 32; first += kRowsAtOnce) {
        const int row = first + lane / kRowLanes;
        const u32 low = ptx::shuffle(static_cast<u32>(address[i]), row), high = ptx::shuffle(static_cast<u32>(address[i] >> 32), row);
        const bool holds = (valid[i] >> row & 1) != 0;
        const u8* source = holds ? reinterpret_cast<const u8*>(static_cast<u64>(high) << 32 | low) + in_row * kBytes : p.k_cache;
        const u32 target = keys + slot * (kTileKeys * kDim) + byte_of(32 * i + row, in_row * kBytes);
        if constexpr (kBytes == 16) ptx::copy_async_16(target, source, holds ? 16 : 0);
        else ptx::copy_async_4(target, source, holds ? 4 : 0);
      }
  }

  // Byte of the tile where a row's byte lies. In rows of 128 B every other one has its halves swapped, so that the eight lanes
  // that a 16-byte load serves at a time, four of each of two rows, meet in no bank.
  static DSA_DEVICE u32 byte_of(int row, int byte) { return row * kDim + (kDim == 128 ? byte ^ (row & 1) << 6 : byte); }

  // A lane's dims of a row, a word for each step.
  DSA_DEVICE void load_row(u32 (&words)[kSteps], u32 rows, int row) const {
#pragma unroll
    for (int piece = 0; piece < Order::kPieces; ++piece) {
      const u32 at = rows + byte_of(row, 4 * Order::kPieceWords * (4 * piece + lane % 4));
      if constexpr (Order::kPieceWords == 4) {
        const Words4 w = ptx::load_shared_16(at);
        words[4 * piece] = w.x, words[4 * piece + 1] = w.y, words[4 * piece + 2] = w.z, words[4 * piece + 3] = w.w;
      } else {
#pragma unroll
        for (int i = 0; i < Order::kPieceWords; ++i) words[i] = ptx::load_shared_4(at + 4 * i);
      }
    }
  }
};

}  // namespace indexer_logits
