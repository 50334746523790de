// A warp's ring of tiles of keys: rows of codes and a word of scales for each, copied asynchronously.
#pragma once
#include "indexer_logits/codes.cuh"
#include "indexer_logits/key_places.cuh"
#include "indexer_logits/query_image.cuh"
#include "prims/ptx/copy_group.cuh"
#include "prims/ptx/copy_word.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
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

  // Whether a page holds any key of the tile. Whole warps come here.
  DSA_DEVICE bool any() const {
    bool has = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) has = has || held[i];
    return ptx::ballot(has) != 0;
  }
};

template <class C, class S, class Codes, class Places, class Params>
struct KeyRing {
  using Order = DimOrder<C::kDim, Codes::kBits>;
  using Unit = typename Places::Unit;
  static constexpr int kRowBytes = C::kRowBytes, kTileKeys = C::kTileKeys, kSteps = C::kDim / 16;
  static constexpr int kLaneKeys = kTileKeys / 32;  // keys whose places a lane finds
  static_assert(kRowBytes == 4 * Order::kLaneBytes);

  const Params& p;
  Places places;
  u32 keys, scales, held;  // shared addresses of the warp's ring
  int warp, lane;
  u32 slot = 0;            // next to be filled, which is the next to be taken where all are full

  DSA_DEVICE KeyRing(const Params& params, S& shared, int warp_, int lane_) : p(params), places(params), warp(warp_), lane(lane_) {
    keys = ptx::shared_address(&shared.keys[warp][0][0]);
    scales = ptx::shared_address(&shared.scales[warp][0][0]);
    held = ptx::shared_address(&shared.held[warp][0][0]);
  }

  // Starts copying the warp's first tiles of a unit, of `count` tiles from `first` on.
  DSA_DEVICE void start(const Unit& unit, u32 first, u32 count) {
    const u32 keys_of_span = (first + count) * kTileKeys, all = unit.keys(p), base = unit.first_key(p);
    end = base + (keys_of_span < all ? keys_of_span : all);
    next = base + (first + warp) * kTileKeys;
    places.start(unit, next + lane, end);
    places.find(next + lane, end);
#pragma unroll
    for (int i = 0; i < C::kStages; ++i) fill();
  }

  // The oldest tile as A operands and what is kept of its keys; its place takes the next tile.
  DSA_DEVICE void take(u32 (&a)[C::kBlocks][kSteps][4], TileKeys<C>& own) {
    ptx::copy_async_wait<C::kStages - 1>();
    ptx::warp_sync();
    const u32 rows = keys + slot * (kTileKeys * kRowBytes), words = scales + slot * (kTileKeys * 4);
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) take_row(a[m], half, rows, words, 16 * m + 8 * half + lane / 4);
#pragma unroll
    for (int i = 0; i < TileKeys<C>::kOwn; ++i) {
      const int key = TileKeys<C>::place(i, lane);
      own.scale[i] = 1.0f;
      if constexpr (!Codes::kBlockScales) own.scale[i] = ptx::float_of(ptx::load_shared_4(words + 4 * key)) * Codes::kScoreFactor;
      own.held[i] = (ptx::load_shared_4(held + 4 * (slot * kLaneKeys + key / 32)) >> key % 32 & 1) != 0;
    }
    ptx::warp_sync();
    fill();
  }

 private:
  u32 end, next;  // of the keys of the span; first key of the tile to fill

  DSA_DEVICE void fill() {
    if (next < end) copy_tile();
    ptx::copy_async_commit();
    slot = slot + 1 == C::kStages ? 0 : slot + 1;
  }

  DSA_DEVICE void copy_tile() {
    u64 address[kLaneKeys];
    u32 valid[kLaneKeys];
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      const KeyPlace place = places.place(i, next + 32 * i + lane);
      address[i] = reinterpret_cast<u64>(place.codes);
      valid[i] = ptx::ballot(place.holds);
      const u8* scale = place.holds ? place.scales : places.somewhere();
      ptx::copy_async_4(scales + 4 * (slot * kTileKeys + 32 * i + lane), scale, place.holds ? 4 : 0);
      if (lane == 0) ptx::store_shared_4(held + 4 * (slot * kLaneKeys + i), valid[i]);
    }
    next += C::kWarps * kTileKeys;
    places.find(next + lane, end);
    p.wide_copies != 0 ? copy_rows<16>(address, valid) : copy_rows<4>(address, valid);
  }

  // All rows of the tile, kBytes a lane and copy. A row that is nowhere becomes zeros.
  template <int kBytes>
  DSA_DEVICE void copy_rows(const u64 (&address)[kLaneKeys], const u32 (&valid)[kLaneKeys]) const {
    constexpr int kRowLanes = kRowBytes / kBytes, kRowsAtOnce = 32 / kRowLanes;
    static_assert(kRowLanes <= 32 && 32 % kRowsAtOnce == 0);
    const int in_row = lane % kRowLanes;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i)
#pragma unroll 4
      for (int first = 0; first < 32; first += kRowsAtOnce) {
        const int row = first + lane / kRowLanes;
        const u32 low = ptx::shuffle(static_cast<u32>(address[i]), row), high = ptx::shuffle(static_cast<u32>(address[i] >> 32), row);
        const bool holds = (valid[i] >> row & 1) != 0;
        const u8* source = places.somewhere();
        if (holds) source = reinterpret_cast<const u8*>(static_cast<u64>(high) << 32 | low) + in_row * kBytes;
        const u32 target = keys + slot * (kTileKeys * kRowBytes) + byte_of(32 * i + row, in_row * kBytes);
        if constexpr (kBytes == 16) ptx::copy_async_16(target, source, holds ? 16 : 0);
        else ptx::copy_async_4(target, source, holds ? 4 : 0);
      }
  }

  // Byte of the tile where a row's byte lies. In rows of 128 B every other one has its halves swapped, so that the eight lanes
  // that a 16-byte load serves at a time, four of each of two rows, meet in no bank.
  static DSA_DEVICE u32 byte_of(int row, int byte) { return row * kRowBytes + (kRowBytes == 128 ? byte ^ (row & 1) << 6 : byte); }

  // A lane's dims of a row, into the operands of a block of keys.
  DSA_DEVICE void take_row(u32 (&a)[kSteps][4], int half, u32 rows, u32 words, int row) const {
    u32 scales_of_row = 0;
    if constexpr (Codes::kBlockScales) scales_of_row = ptx::load_shared_4(words + 4 * row);
#pragma unroll
    for (int piece = 0; piece < Order::kPieces; ++piece) {
      const int place = 4 * piece + lane % 4;
      u32 codes[Order::kPieceBytes / 4];
      load_piece(codes, rows + byte_of(row, Order::kPieceBytes * place));
      const typename Codes::Factor factor = Codes::factor(scales_of_row, place * Order::kPieceQuads / 8);
#pragma unroll
      for (int i = 0; i < Order::kPieceQuads; ++i) {
        u32(&operand)[4] = a[piece * Order::kPieceQuads + i];
        Codes::quad(Order::quad_of(codes, i), factor, operand[half], operand[half + 2]);
      }
    }
  }

  static DSA_DEVICE void load_piece(u32 (&codes)[Order::kPieceBytes / 4], u32 at) {
    if constexpr (Order::kPieceBytes == 16) {
      const Words4 w = ptx::load_shared_16(at);
      codes[0] = w.x, codes[1] = w.y, codes[2] = w.z, codes[3] = w.w;
    } else {
#pragma unroll
      for (int i = 0; i < Order::kPieceBytes / 4; ++i) codes[i] = ptx::load_shared_4(at + 4 * i);
    }
  }
};

}  // namespace indexer_logits
