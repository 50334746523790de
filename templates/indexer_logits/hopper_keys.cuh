// A warp's ring of 32 keys each: paged rows of codes as they lie in the cache, brought by bulk copies, and their scales.
#pragma once
#include "indexer_logits/hopper_query.cuh"
#include "indexer_logits/work.cuh"
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/copy_word.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/load_pair.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/rows.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

constexpr int kWarpKeys = 32;

// What a lane keeps of the key whose scores it stores: its scale, and whether a page holds it.
struct OwnKey {
  float scale;
  bool held;

  // Among the warp's keys: of row l/4 of the first or the second product (bit 1), + 8 (bit 0).
  static DSA_DEVICE int place(int lane) { return lane / 4 + lane / 2 % 2 * 16 + lane % 2 * 8; }
};

// kOnePage: pages begin at multiples of 16 B and have whole warps' keys, which then lie in one page. One lane copies them: what
// a refill takes is time that the warp's products wait.
template <class C, class S, class Operands, class Params, bool kOnePage>
struct BulkKeyRing {
  using Place = PlaceOf<S>;
  static constexpr int kRowBytes = C::kRowBytes, kSteps = Operands::kSteps, kKeyBytes = kWarpKeys * kRowBytes;
  static constexpr int kWords = kRowBytes / 16;  // of a lane and key
  static constexpr u32 kNoPage = 0xffffffffu, kAll = 0xffffffffu;
  // The lane that announces the bytes of bulk copies, and each lane for its copies of words where there are any.
  static constexpr int kArrivals = kOnePage ? 1 : 33;

  const Params& p;
  const Place place;
  int warp, lane;
  u32 slot = 0, parity = 0;  // of the oldest tile in the ring
  u32 stages;                // as many as q leaves room for
  u32 first_codes;           // of the warp's ring
  DSA_DEVICE BulkKeyRing(const Params& params, const Place& shared, int warp_, int lane_)
      : p(params), place(shared), warp(warp_), lane(lane_) {
    static_assert(C::kMostStages <= 32, "a lane for each barrier");
    const u32 image = static_cast<u32>(p.unit_tokens) * C::kTokenBytes, room = (C::kOperandBytes - image) / (C::kWarps * kKeyBytes);
    stages = room < C::kMostStages ? room : C::kMostStages;
    first_codes = place.operands() + image + warp * stages * kKeyBytes;
    if (lane < C::kMostStages) {
      ptx::mbarrier_init(landed(lane), kArrivals);
      ptx::fence_mbarrier_init();
    }
    ptx::warp_sync();
  }

  // Asks where the warp's keys lie, a quarter of a tile each, of the first tiles of a unit: of `count` tiles of `tile_keys` from
  // `first` on.
  DSA_DEVICE void ask(const Unit& unit, u32 first, u32 count, u32 tile_keys) {
    table = p.block_table + unit.request * p.table_stride;
    const u32 all = unit.keys(p);
    // Tiles that the span has, whether or not a key is among the warp's of the last one.
    last = (first + count) * tile_keys;
    end = last < all ? last : all;
    own_keys = tile_keys / 4;
    next = (first + warp / 4) * tile_keys + warp % 4 * own_keys;
#pragma unroll
    for (int i = 0; i < C::kMostStages; ++i) pages[i] = page_of(next + i * step());
  }

  // Starts copying what was asked for. The ring is empty.
  DSA_DEVICE void start() {
    u32 to = slot;
#pragma unroll 1
    for (u32 i = 0; i < stages && next < last; ++i) {
      fill(to, pages[0]);
      to = to + 1 == stages ? 0 : to + 1;
#pragma unroll
      for (int n = 0; n + 1 < C::kMostStages; ++n) pages[n] = pages[n + 1];
    }
    page = page_of(next);
  }

  // The oldest tile as A operands of two products, and what is kept of the lane's own key.
  DSA_DEVICE void take(u32 (&a)[2][kSteps][4], OwnKey& own) {
    ptx::mbarrier_wait(landed(slot), parity);
    const u32 mask = ptx::load_shared_4(held(slot));
    if (mask == kAll) {
      load_rows<true>(a, mask);
    } else {
      load_rows<false>(a, mask);
    }
    const int key = OwnKey::place(lane);
    own.held = (mask >> key & 1) != 0;
    own.scale = 1.0f;
    if (!Operands::kBlockScales && own.held) own.scale = ptx::float_of(ptx::load_shared_4(scales(slot) + 4 * key));
  }

  DSA_DEVICE void take_and_refill(u32 (&a)[2][kSteps][4], OwnKey& own) {
    take(a, own);
    refill();
  }

  // The place of the tile that was taken takes the next one.
  DSA_DEVICE void refill() {
    ptx::warp_sync();
    if (next < last) {
      fill(slot, page);
      page = page_of(next);
    }
    if (++slot == stages) slot = 0, parity ^= 1;
  }

 private:
  u32 pages[C::kMostStages];  // of the lane's keys in the first tiles, all asked for before any is waited for
  const i32* table;
  u32 end, last, next;  // of keys, of the rows of tiles; the warp's first key of the tile to fill
  u32 own_keys;         // of the warp, at most kWarpKeys
  u32 page;             // of the lane's key in that tile, asked for a tile ahead

  DSA_DEVICE u32 step() const { return C::kWarps * own_keys; }  // from one tile of the warp's group to the next

  DSA_DEVICE u32 codes(u32 of) const { return first_codes + of * kKeyBytes; }
  DSA_DEVICE u32 scales(u32 of) const { return place.scales() + (warp * C::kMostStages + of) * (4 * kWarpKeys); }
  DSA_DEVICE u32 held(u32 of) const { return place.held() + (warp * C::kMostStages + of) * 4; }
  DSA_DEVICE u32 landed(u32 of) const { return place.landed() + (warp * C::kMostStages + of) * 8; }

  DSA_DEVICE u32 page_of(u32 first) const {
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
    u32 key = first + lane;
    bool wanted = static_cast<u32>(lane) < own_keys && key < end;
    // Every lane asks, so that the number stays in a register of each: from one of the warp a copy of it would be made, and
    // waited for, at once.
    if (kOnePage && !wanted) key = first, wanted = first < end;
    return wanted ? ptx::load_global_4(table + divisor.divide(key)) : kNoPage;
  }

  DSA_DEVICE void fill(u32 to, u32 of_page) {
    if constexpr (kOnePage) {
      if (ptx::elect_one()) copy_page(to, of_page);
    } else {
      copy_keys(to, of_page);
    }
    next += step();
  }

  // Keys of a page: those behind the last one that is seen are there, too, and nobody stores what comes of them.
  DSA_DEVICE void copy_page(u32 to, u32 of_page) const {
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
    const u32 offset = next - divisor.divide(next) * p.page_size, barrier = landed(to);
    const bool holds = of_page < p.pool_pages;
    ptx::store_shared_4(held(to), holds ? kAll >> (kWarpKeys - own_keys) : 0);
    ptx::mbarrier_arrive_expect(barrier, holds ? own_keys * (kRowBytes + 4) : 0);
    if (!holds) return;
    const u8* base = p.k_cache + static_cast<i64>(of_page) * p.page_stride_bytes;
    ptx::copy_bulk(codes(to), base + static_cast<i64>(offset) * kRowBytes, own_keys * kRowBytes, barrier);
    ptx::copy_bulk(scales(to), base + (static_cast<i64>(p.page_size) * kRowBytes + 4 * offset), own_keys * 4, barrier);
  }

  // Keys of any pages.
  DSA_DEVICE void copy_keys(u32 to, u32 of_page) const {
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
    const u32 key = next + lane, offset = key - divisor.divide(key) * p.page_size, barrier = landed(to);
    const bool holds = of_page < p.pool_pages;
    const u8* base = p.k_cache + (holds ? static_cast<i64>(of_page) * p.page_stride_bytes : 0);
    const u8* source = base + static_cast<i64>(offset) * kRowBytes;
    const u8* scale = base + static_cast<i64>(p.page_size) * kRowBytes + 4 * static_cast<i64>(offset);
    const u32 valid = ptx::ballot(holds);
    ptx::copy_async_4(scales(to) + 4 * lane, holds ? scale : p.k_cache, holds ? 4 : 0);
    const bool wide = p.wide_copies != 0;
    if (lane == 0) {
      ptx::store_shared_4(held(to), valid);
      ptx::mbarrier_arrive_expect(barrier, wide ? ptx::count_ones(valid) * kRowBytes : 0);
    }
    if (wide) {
      copy_pieces(codes(to), source, holds, offset, barrier);
    } else {
      copy_words(codes(to), reinterpret_cast<u64>(source), valid);
    }
    ptx::mbarrier_arrive_after_copies(barrier);
  }

  // One copy for the keys that a page holds: where lane and offset say that they begin.
  DSA_DEVICE void copy_pieces(u32 target, const u8* source, bool holds, u32 offset, u32 barrier) const {
    if (!holds || (lane != 0 && offset != 0)) return;
    u32 keys = own_keys - lane;
    if (end - next - lane < keys) keys = end - next - lane;
    if (p.page_size - offset < keys) keys = p.page_size - offset;
    ptx::copy_bulk(target + lane * kRowBytes, source, keys * kRowBytes, barrier);
  }

  // The same by words, which need no alignment to 16 bytes.
  DSA_DEVICE void copy_words(u32 target, u64 source, u32 valid) const {
    constexpr int kRowWords = kRowBytes / 4;
    const u32 low = static_cast<u32>(source), high = static_cast<u32>(source >> 32);
#pragma unroll 2
    for (int i = 0; i < kWarpKeys * kRowWords / 32; ++i) {
      const int word = 32 * i + lane, key = word / kRowWords;
      const u64 from = (static_cast<u64>(ptx::shuffle(high, key)) << 32 | ptx::shuffle(low, key)) + word % kRowWords * 4;
      if (valid >> key & 1) ptx::copy_async_4(target + 4 * word, reinterpret_cast<const u8*>(from), 4);
    }
  }

  // A lane's dims of its four keys, rows r and r + 8 of each product; zeros where no page holds one.
  template <bool kAllHeld>
  DSA_DEVICE void load_rows(u32 (&a)[2][kSteps][4], u32 mask) const {
    constexpr int kPieceBytes = kRowBytes >= 64 ? 16 : kRowBytes / 4;
    const u32 rows = codes(slot) + lane / 4 * kRowBytes + lane % 4 * kPieceBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 words[kWords], of_blocks = 0;
      const bool held = kAllHeld || (mask >> (lane / 4 + 8 * i) & 1) != 0;
      load_row(words, rows + 8 * i * kRowBytes, held);
      if (Operands::kBlockScales && held) of_blocks = ptx::load_shared_4(scales(slot) + 4 * (lane / 4 + 8 * i));
      Operands::take(a[i / 2], i % 2, words, of_blocks, lane);
    }
  }

  // In rows of 128 B every other one begins with its second half, so that the eight lanes that a 16-byte load serves at a
  // time, four of each of two rows, meet in no bank.
  DSA_DEVICE void load_row(u32 (&words)[kWords], u32 at, bool wanted) const {
    if constexpr (kRowBytes == 128) {
      const bool turned = lane / 4 % 2 != 0;
      const Words4 x = load_16(at + (turned ? 64 : 0), wanted), y = load_16(at + (turned ? 0 : 64), wanted);
      words[0] = turned ? y.x : x.x, words[1] = turned ? y.y : x.y, words[2] = turned ? y.z : x.z, words[3] = turned ? y.w : x.w;
      words[4] = turned ? x.x : y.x, words[5] = turned ? x.y : y.y, words[6] = turned ? x.z : y.z, words[7] = turned ? x.w : y.w;
    } else if constexpr (kRowBytes == 64) {
      const Words4 x = load_16(at, wanted);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if constexpr (kRowBytes == 32) {
      words[0] = words[1] = 0;
      if (wanted) ptx::load_shared_8(words[0], words[1], at);
    } else {
      words[0] = wanted ? ptx::load_shared_4(at) : 0;
    }
  }

  static DSA_DEVICE Words4 load_16(u32 at, bool wanted) {
    if (wanted) return ptx::load_shared_16(at);
    return Words4{0, 0, 0, 0};
  }
};

}  // namespace indexer_logits
