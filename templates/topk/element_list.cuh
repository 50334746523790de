// Elements of a row that a block has kept: a list of indices in shared memory, in any order, later with their keys. Selects
// from it and writes the selected, in index order or as they come.
//
// Barrier 0: keys are known (the row is not read any more); two for each digit, and one for each but the first when its
// keys are counted; rivals are known; the last of them that is selected is; where order is wanted, selected indices are in
// the bitmap; the threads' counts are summed; the selected indices are where the keys were. The bitmap is clear before and
// after.
#pragma once
#include "prims/ptx/atomic.cuh"
#include "prims/ptx/bits.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/reduce.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/scan.cuh"
#include "topk/bounded.cuh"
#include "topk/output.cuh"
#include "topk/threshold.cuh"

namespace topk {

template <class C, class S, int kThreads, int kDigitBits>
struct ElementList {
  using Digits = DigitSearch<kThreads, kDigitBits>;
  static constexpr u32 kRoom = C::kElements, kBitmapWords = C::kBitmapWords, kWindow = kBitmapWords * 32;
  static constexpr u32 kWordsEach = kBitmapWords / kThreads;
  static constexpr u32 kNone = 0xffffffffu;  // no index
  static constexpr u32 kAtOnce = C::kAtOnce;  // scores of listed elements that a thread waits for together
  // So few elements are compared all with all.
  static constexpr u32 kRivals = C::kRivals, kWarps = kThreads / 32;
  static_assert(kBitmapWords % kThreads == 0);

  S& shared;
  const Digits& digits;
  const u32 thread, keys, indices, listed, rivals, bitmap;

  DSA_DEVICE ElementList(S& storage, const Digits& search)
      : shared(storage), digits(search), thread(static_cast<u32>(ptx::thread_index())), keys(ptx::shared_address(&storage.keys[0])),
        indices(ptx::shared_address(&storage.indices[0])), listed(ptx::shared_address(&storage.listed[0])),
        rivals(ptx::shared_address(&storage.rivals[0])), bitmap(ptx::shared_address(&storage.bitmap[0])) {}

  // Before the first element; a barrier must follow.
  DSA_DEVICE void clear() const {
    if (thread == 0) {
      ptx::store_shared_4(listed, 0);
      ptx::store_shared_4(rivals_listed(), 0);
    }
#pragma unroll
    for (u32 w = 0; w < kWordsEach; ++w) ptx::store_shared_4(bitmap + 4 * (thread * kWordsEach + w), 0);
  }

  // A place for each of `count` elements of this thread, all in a row; the first of them. All lanes of the warp come here.
  DSA_DEVICE u32 reserve_by_warp(u32 count) const {
    const int lane = static_cast<int>(thread % 32);
    const u32 inclusive = tile::warp_inclusive_sum(count, lane);
    const u32 before = lane == 31 && inclusive != 0 ? reserve(inclusive) : 0;
    return ptx::shuffle(before, 31) + inclusive - count;
  }
  DSA_DEVICE u32 reserve(u32 count) const { return ptx::shared_fetch_add(listed, count); }
  DSA_DEVICE void set(u32 place, u32 index) const { ptx::store_shared_4(indices + 4 * place, index); }
  DSA_DEVICE u32 index(u32 place) const { return ptx::load_shared_4(indices + 4 * place); }
  DSA_DEVICE u32 size() const { return ptx::load_shared_4(listed); }
  DSA_DEVICE void set_size(u32 count) const { ptx::store_shared_4(listed, count); }
  // A word that one thread leaves for the others.
  DSA_DEVICE u32 note(u32 word) const { return ptx::load_shared_4(listed + 4 + 4 * word); }
  DSA_DEVICE void set_note(u32 word, u32 value) const { ptx::store_shared_4(listed + 4 + 4 * word, value); }

  // Selects what `t` says of `k` slots, the list holding all that wins and all that ties, and writes it; returns how many.
  // `open_end`: keys beyond what t covers are in question, too. `after_row` is called once the block does not read the row
  // any more.
  template <class Row, class Output, class After>
  DSA_DEVICE u32 select(Threshold t, bool open_end, u32 k, const Row& row, const Output& output, After after_row) const {
    const u32 count = size();
    // Keys below the floor were counted, some even above t's, and are not listed.
    if (t.base < row.floor) t.equal = count - least(count, k - t.ties);
    const Threshold first = t;
    bool counted = open_end ? t.open() : wants_digit(t, row.floor);
    int bits = least(t.shift, kDigitBits);
    const u32 last = (1u << bits) - 1;
#pragma unroll 1
    for (u32 begin = thread; begin < count; begin += kAtOnce * kThreads) {
      u32 scores[kAtOnce];
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j)
        if (begin + j * kThreads < count) scores[j] = row.bits_at(index(begin + j * kThreads));
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) {
        if (begin + j * kThreads >= count) break;
        const u32 key = Row::Score::key(scores[j]);
        ptx::store_shared_4(keys + 4 * (begin + j * kThreads), key);
        if (counted && (open_end || t.covers(key))) digits.count(least(t.digit(key, bits), last));
      }
    }
    ptx::block_sync();
    after_row();
    while (counted) {
      t = digits.next(t, bits);
      // Larger keys were counted with the last digit, so its end is not known: once more from the top.
      if (open_end && t.base == first.base + (last << t.shift)) t = Threshold{0, Row::Score::kKeyBits, k, count};
      open_end = false;
      counted = wants_digit(t, row.floor);
      if (!counted) break;
      bits = least(t.shift, kDigitBits);
      for (u32 i = thread; i < count; i += kThreads)
        if (t.covers(key(i))) digits.count(t.digit(key(i), bits));
      ptx::block_sync();
    }
    Selected selected{Bounds(t, row.floor), 0};
    if (selected.bounds.tie_size != 0) selected = few(t, row.floor) ? among_rivals(count, t) : among_equals(count, t, selected.bounds, row.length());
    // A row that is taken whole keeps its order.
    const bool in_order = output.ordered || row.length() <= k;
    const u32 written = in_order ? gather_in_order(count, selected, row.length()) : gather(count, selected);
    put_all(written, output);
    return written;
  }

 private:
  struct Selected {
    Bounds bounds;
    u32 last_index;  // the largest that is selected among those that tie

    DSA_DEVICE bool has(u32 key, u32 index) const { return bounds.wins(key) || (bounds.tied(key) && index <= last_index); }
  };

  DSA_DEVICE u32 key(u32 place) const { return ptx::load_shared_4(keys + 4 * place); }

  // Whether those in question can be compared all with all. (Below the floor there are others that were counted.)
  static DSA_DEVICE bool few(const Threshold& t, u32 floor) { return t.equal <= kRivals && t.base >= floor && t.shift < 32; }

  static DSA_DEVICE bool wants_digit(const Threshold& t, u32 floor) { return t.open() && t.shift > 0 && !few(t, floor); }

  // Of few in question, whose keys may differ: a warp finds how many are before one of them.
  DSA_DEVICE Selected among_rivals(u32 count, const Threshold& t) const {
    for (u32 i = thread; i < count; i += kThreads)
      if (t.covers(key(i))) put_rival(ptx::shared_fetch_add(rivals_listed(), 1), key(i), index(i));
    ptx::block_sync();
    const u32 lane = thread % 32;
#pragma unroll 1
    for (u32 rival = thread / 32; rival < t.equal; rival += kWarps) {
      const u32 key = rival_key(rival), index = rival_index(rival);
      u32 before = 0;
      for (u32 other = lane; other < t.equal; other += 32)
        before += rival_key(other) > key || (rival_key(other) == key && rival_index(other) < index);
      if (ptx::warp_sum(before) == t.ties - 1 && lane == 0) ptx::store_shared_16(digits.found, Words4{key, index, 0, 0});
    }
    ptx::block_sync();
    const Words4 last = ptx::load_shared_16(digits.found);
    return {Bounds({last.x, 0, 1, 2}, 0), last.y};
  }
  DSA_DEVICE u32 rivals_listed() const { return listed + 12; }
  DSA_DEVICE void put_rival(u32 rival, u32 key, u32 index) const {
    ptx::store_shared_4(rivals + 4 * rival, key);
    ptx::store_shared_4(rivals + 4 * (kRivals + rival), index);
  }
  DSA_DEVICE u32 rival_key(u32 rival) const { return ptx::load_shared_4(rivals + 4 * rival); }
  DSA_DEVICE u32 rival_index(u32 rival) const { return ptx::load_shared_4(rivals + 4 * (kRivals + rival)); }

  // Among equals the lower index wins, so how far it is from the row's end is a key: the least one that is selected. All
  // differ, so this ends with none left open.
  DSA_DEVICE Selected among_equals(u32 count, const Threshold& t, const Bounds& bounds, u32 length) const {
    const u32 end = length - 1;
    Threshold order{0, static_cast<int>(ptx::highest_bit(end | 1)) + 1, t.ties, t.equal};
#pragma unroll 1
    while (order.open()) {
      const int bits = least(order.shift, kDigitBits);
      for (u32 i = thread; i < count; i += kThreads)
        if (bounds.tied(key(i)) && order.covers(end - index(i))) digits.count(order.digit(end - index(i), bits));
      ptx::block_sync();
      order = digits.next(order, bits);
    }
    return {bounds, end - order.base};
  }

  // Selected indices to where the keys were, in the order of the list, a thread's in a row; returns how many.
  DSA_DEVICE u32 gather(u32 count, const Selected& selected) const {
    static_assert(kRoom <= 32 * kThreads, "a bit for each of a thread's elements");
    u32 mine = 0, total, bit = 1;
    for (u32 i = thread; i < count; i += kThreads, bit <<= 1)
      if (selected.has(key(i), index(i))) mine |= bit;
    u32 slot = tile::block_exclusive_sum<kThreads>(ptx::count_ones(mine), ptx::shared_address(&shared.warp_sums[1][0]), total);
    for (u32 i = thread; mine != 0; i += kThreads, mine >>= 1)
      if ((mine & 1) != 0) ptx::store_shared_4(keys + 4 * slot++, index(i));
    return total;
  }

  // The same in the order of the indices: a bit for each selected one of a window, window by window.
  DSA_DEVICE u32 gather_in_order(u32 count, const Selected& selected, u32 length) const {
    u32 written = 0;
#pragma unroll 1
    for (u32 window = 0; window < length; window += kWindow) {
      for (u32 i = thread; i < count; i += kThreads) {
        const u32 at = index(i);
        if (window == 0 && !selected.has(key(i), at)) {
          if (length > kWindow) set(i, kNone);
          continue;
        }
        if (at - window < kWindow) ptx::shared_or(bitmap + (at - window) / 32 * 4, 1u << at % 32);
      }
      ptx::block_sync();
      written += put_in_order(window, written);
    }
    return written;
  }

  // The indices that lie where the keys were, to the row's slots; two at a time, so that their table entries come together.
  template <class Output>
  DSA_DEVICE void put_all(u32 count, const Output& output) const {
    ptx::block_sync();
    for (u32 slot = thread; slot < count; slot += 2 * kThreads) {
      const bool two = slot + kThreads < count;
      const u32 first = key(slot), second = two ? key(slot + kThreads) : first;
      const auto id = output.translate(first), other = output.translate(second);
      output.store(slot, first, id);
      if (two) output.store(slot + kThreads, second, other);
    }
  }

  // Reads and clears this thread's words of the bitmap; returns how many bits the whole block has.
  DSA_DEVICE u32 put_in_order(u32 window, u32 written) const {
    u32 words[kWordsEach], mine = 0, total;
#pragma unroll
    for (u32 w = 0; w < kWordsEach; ++w) {
      const u32 word = bitmap + 4 * (thread * kWordsEach + w);
      words[w] = ptx::load_shared_4(word);
      ptx::store_shared_4(word, 0);
      mine += ptx::count_ones(words[w]);
    }
    u32 slot = written + tile::block_exclusive_sum<kThreads>(mine, ptx::shared_address(&shared.warp_sums[1][0]), total);
#pragma unroll
    for (u32 w = 0; w < kWordsEach; ++w) {
      const u32 first = window + (thread * kWordsEach + w) * 32;
#pragma unroll 1
      for (u32 left = words[w]; left != 0; left &= left - 1)
        ptx::store_shared_4(keys + 4 * slot++, first + ptx::highest_bit(left & (0u - left)));
    }
    return total;
  }
};

}  // namespace topk
