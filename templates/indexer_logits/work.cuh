// What a block does: units, which are some tokens that pass over keys together, and the tiles of keys that they see.
#pragma once
#include "prims/ptx/bits.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/reduce.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/scan.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// Keys that a token sees: begin .. end - 1.
struct Window {
  u32 begin, end;
};

// Tokens first_token .. + tokens of a request, whose q fits the image together. Its keys lie in pages and begin with key 0.
struct Unit {
  static constexpr bool kFills = true;  // -inf outside of windows, where a call asks for it
  u32 request;
  int first_token, tokens;

  template <class Params>
  DSA_DEVICE Unit(const Params& p, u32 unit) {
    // Most calls have one unit a request, and a division takes as long as a fifth of a load.
    request = p.unit_count == 1 ? unit : unit / static_cast<u32>(p.unit_count);
    first_token = static_cast<int>(unit - request * p.unit_count) * p.unit_tokens;
    tokens = p.next_n - first_token < p.unit_tokens ? p.next_n - first_token : p.unit_tokens;
  }

  template <class Params>
  static DSA_DEVICE u32 units(const Params& p) { return static_cast<u32>(p.batch) * p.unit_count; }

  // Keys that a token of the request sees: 0 .. limit - 1. One length of a request is its last token's; those before see one
  // key less each.
  template <class Params>
  DSA_DEVICE u32 limit(const Params& p, int token) const {
    const i32* lens = p.lens + request * p.lens_stride_b;
    const i64 length = p.per_token != 0 ? static_cast<i64>(lens[token * p.lens_stride_n]) : static_cast<i64>(lens[0]) - (p.next_n - 1 - token);
    return length <= 0 ? 0 : length < p.most_keys ? static_cast<u32>(length) : static_cast<u32>(p.most_keys);
  }

  // Those that are scored: none where a selection takes all of them unread.
  template <class Params>
  DSA_DEVICE u32 scored(const Params& p, int token) const {
    const u32 keys = limit(p, token);
    return keys <= static_cast<u32>(p.unscored) ? 0 : keys;
  }

  // Keys that any of its tokens needs.
  template <class Params>
  DSA_DEVICE u32 keys(const Params& p) const {
    u32 most = 0;
    for (int token = 0; token < tokens; ++token) {
      const u32 own = scored(p, first_token + token);
      most = own > most ? own : most;
    }
    return most;
  }

  template <class Params>
  DSA_DEVICE u32 first_key(const Params&) const { return 0; }

  // As `scored`, of its i-th token.
  template <class Params>
  DSA_DEVICE Window window(const Params& p, int i) const {
    return {0, scored(p, first_token + i)};
  }

  // The key whose score is in column 0.
  template <class Params>
  static DSA_DEVICE u32 origin(const Params&, const Window&) { return 0; }

  // Rows of scores, and columns of one that are not filled.
  template <class Params>
  static DSA_DEVICE u64 rows(const Params& p) { return static_cast<u64>(p.batch) * p.next_n; }
  template <class Params>
  static DSA_DEVICE Window columns(const Params& p, u64 row) {
    const u32 request = static_cast<u32>(row / p.next_n);
    return {0, Unit(p, request * p.unit_count).limit(p, static_cast<int>(row - static_cast<u64>(request) * p.next_n))};
  }

  // Where q of a head of its i-th token begins, in bytes, and that token's scales of q, in words.
  template <class Params>
  DSA_DEVICE i64 query_byte(const Params& p, int i, int head) const {
    return request * p.q_stride_b + (first_token + i) * p.q_stride_n + head * p.q_stride_h;
  }
  template <class Params>
  DSA_DEVICE i64 query_scale(const Params& p, int i) const {
    return request * p.q_scale_stride_b + (first_token + i) * p.q_scale_stride_n;
  }

  // Row of scores and weights of its i-th token.
  template <class Params>
  DSA_DEVICE i64 row(const Params& p, int i) const {
    return static_cast<i64>(request) * p.next_n + first_token + i;
  }
};

// The block's span of the tiles of all units, a unit at a time: `tiles` of `unit` from `first_tile`, 0 at the end. All
// threads hold the same. Tiles have C::kTileKeys keys, or half as many so often that each block has one, down to kLeastKeys.
template <class C, class S, class Params, class Units = Unit, u32 kLeastKeys = C::kTileKeys>
struct Span {
  static constexpr u32 kThreads = 32 * C::kWarps;
  static constexpr bool kVaries = kLeastKeys != C::kTileKeys;
  u32 unit, first_tile, tiles, tile_keys = C::kTileKeys;

  DSA_DEVICE Span(const Params& params, S& shared) : p(params), units(Units::units(params)) {
    const u32 thread = static_cast<u32>(ptx::thread_index());
    if constexpr (kVaries) {
      if (units <= 32) {
        find_in_warp(thread % 32);
        return;
      }
    }
    const u32 own = tiles_of(thread);
    u32 mine = own, total;
    for (u32 u = thread + kThreads; u < units; u += kThreads) mine += tiles_of(u);
    const u32 sums = ptx::shared_address(&shared.warp_sums[0][0]), found = ptx::shared_address(&shared.found[0]);
    tile::block_exclusive_sum<static_cast<int>(kThreads)>(mine, sums, total);
    const u64 block = ptx::block_index();
    const u32 begin = static_cast<u32>(total * block / p.blocks), end = static_cast<u32>(total * (block + 1) / p.blocks);
    left = end - begin;
    unit = first_tile = tiles = 0;
    if (left == 0) return;
    if (thread == 0) ptx::store_shared_4(found, units);
    u32 before = 0;
    // Lengths that someone changes meanwhile give no unit, or another one: never one that there is not.
#pragma unroll 1
    for (u32 first = 0; before <= begin && first < units; first += kThreads) {
      const u32 count = first == 0 ? own : tiles_of(first + thread);
      u32 sum;
      const u32 start = before + tile::block_exclusive_sum<static_cast<int>(kThreads)>(count, sums + 128 * (1 + first / kThreads % 2), sum);
      if (start <= begin && begin - start < count) {
        ptx::store_shared_4(found, first + thread);
        ptx::store_shared_4(found + 4, begin - start);
      }
      before += sum;
    }
    ptx::block_sync();
    unit = ptx::load_shared_4(found);
    if (unit < units) {
      first_tile = ptx::load_shared_4(found + 4);
      take();
    }
  }

  // On to the next unit that has tiles. Whole warps come here.
  DSA_DEVICE void advance() {
    left -= tiles;
    tiles = first_tile = 0;
    if (left == 0) return;
    const u32 lane = static_cast<u32>(ptx::thread_index()) % 32;
    u32 has = 0;
    while (has == 0 && unit < units) {
      has = ptx::ballot(tiles_of(unit + 1 + lane) != 0);
      unit += has == 0 ? 32 : 1 + ptx::highest_bit(has & -has);
    }
    if (has != 0) take();
  }

 private:
  // Where tiles vary and a warp has a lane for each unit it finds the span by itself: calls of few requests have no time for barriers.
  DSA_DEVICE void find_in_warp(u32 lane) {
    tile_keys = kLeastKeys;
    for (u32 all = ptx::warp_sum(tiles_of(lane)); tile_keys < C::kTileKeys && all > p.blocks; all /= 2) tile_keys *= 2;
    const u32 own = tiles_of(lane), sum = tile::warp_inclusive_sum(own, static_cast<int>(lane)), start = sum - own;
    // What does not divide goes to the first blocks, which have SMs of their own.
    const u32 total = ptx::shuffle(sum, 31), block = static_cast<u32>(ptx::block_index()), blocks = p.blocks;
    const u32 each = total / blocks, rest = total - each * blocks;
    const u32 begin = each * block + (block < rest ? block : rest);
    left = each + (block < rest ? 1 : 0);
    first_tile = tiles = 0;
    unit = ptx::highest_bit(ptx::ballot(start <= begin && begin - start < own));
    if (unit >= units) left = 0;
    if (left == 0) return;
    first_tile = begin - ptx::shuffle(start, static_cast<int>(unit));
    take();
  }

  const Params& p;
  const u32 units;
  u32 left;  // tiles of the block that are not done

  DSA_DEVICE void take() {
    const u32 all = tiles_of(unit), rest = all > first_tile ? all - first_tile : 0;
    tiles = rest < left ? rest : left;
  }

  DSA_DEVICE u32 tiles_of(u32 u) const {
    const u32 keys = u < units ? Units(p, u).keys(p) : 0;
    if constexpr (kVaries) return (keys + tile_keys - 1) >> ptx::highest_bit(tile_keys);
    return (keys + C::kTileKeys - 1) / C::kTileKeys;
  }
};

}  // namespace indexer_logits
