// Candidates for a selection: what of a row reaches a guess, in lists of the blocks of a cluster. One block has them all in
// registers, finds the k largest by one digit and a few rivals, and writes them as they come.
//
//   list     each block: where in its part they are, then their keys and indices
//   take     candidates to registers, from the lists of all
//   find     histogram of their next digit -> the digit of the k-th
//   put      those above are written as they come; in the last slots those of this digit, compared all with all
//
// What costs is instructions of a warp times the warps, so that branches for each candidate are few.
//
// Barrier 0, all threads: digits are counted; two of the search; rivals are known, and winners are where the list's keys were.
#pragma once
#include "prims/ptx/atomic.cuh"
#include "prims/ptx/bits.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/cluster.cuh"
#include "prims/ptx/cluster_words.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/funnel.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/reduce.cuh"
#include "prims/ptx/thread.cuh"
#include "topk/bounded.cuh"
#include "topk/score.cuh"
#include "topk/threshold.cuh"
#include "topk/top_bins.cuh"

namespace topk {

// Lists where in a part in shared memory scores reach a key above -inf. A part begins with its own first vector, and what
// lies outside of it in its first and last vector is the lowest score there. The list's size is theirs, even if it has less
// room.
template <class C, class Score, class Copy, class Row, class List>
DSA_DEVICE void list_places(const Row& part, u32 words, u32 landed, u32 lowest, const List& list) {
  constexpr u32 kThreads = C::kThreads, kInFlight = C::kInFlight, kElements = Row::kElements, kBits = kInFlight * kElements;
  constexpr u32 kLowest = Score::kLowestWord, kBatches = 32 / kBits;
  static_assert(Copy::kBatchVectors == kInFlight * kThreads && kBatches * kBits == 32);
  const u32 thread = static_cast<u32>(ptx::thread_index()), vectors = part.vectors(), mine = words + 16 * thread;
  const float below = ptx::float_of(number_below_key(lowest << (32 - Score::kKeyBits)));
  u32 next = 0;
#pragma unroll 1
  for (u32 begin = 0; begin < vectors; begin += kBatches * Copy::kBatchVectors) {
    u32 wanted = 0;  // of a thread's vector u, element e: bit u * kElements + e
#pragma unroll
    for (u32 batch = 0; batch < kBatches; ++batch) {
      const u32 first = begin + batch * Copy::kBatchVectors;
      if (first >= vectors) break;
      Copy::wait(next++, landed);
      Words4 v[kInFlight];
      if (first + Copy::kBatchVectors <= vectors) {
#pragma unroll
        for (u32 u = 0; u < kInFlight; ++u) v[u] = ptx::load_shared_16(mine + 16 * (first + u * kThreads));
      } else {
#pragma unroll
        for (u32 u = 0; u < kInFlight; ++u) {
          v[u] = {kLowest, kLowest, kLowest, kLowest};
          if (first + u * kThreads + thread < vectors) v[u] = ptx::load_shared_16(mine + 16 * (first + u * kThreads));
        }
      }
      u32 bits = 0;
#pragma unroll
      for (int e = static_cast<int>(kBits) - 1; e >= 0; --e) {
        const Words4& w = v[e / kElements];
        const u32 all[4] = {w.x, w.y, w.z, w.w};
        // Of the difference the sign counts: numbers above `below` give a negative one, NaN does not.
        const u32 score = Score::bits(all[e % kElements / Score::kPerWord], e % Score::kPerWord);
        bits = ptx::push_top_bit(bits, ptx::bits_of(below - ptx::float_of(score)));
      }
      wanted |= bits << batch * kBits;
    }
    u32 place = list.reserve_by_warp(ptx::count_ones(wanted));
    const u32 from = (begin + thread) * kElements;
#pragma unroll 1
    for (; wanted != 0; ++place) {
      const u32 bit = ptx::highest_bit(wanted);
      wanted ^= 1u << bit;
      if (place < List::kRoom) list.set(place, from + bit % kElements + (bit - bit % kElements) * kThreads);
    }
  }
}

// Indices of the row in place of those of the part, and keys: a thread for each of the list's first `count` elements.
template <class C, class Score, class Row, class List>
DSA_DEVICE void add_keys(const Row& part, u32 words, u32 count, const List& list) {
#pragma unroll 1
  for (u32 place = static_cast<u32>(ptx::thread_index()); place < count; place += C::kThreads) {
    const u32 at = list.index(place), word = ptx::load_shared_4(words + 4 * (at / Score::kPerWord));
    list.set(place, at - part.origin);
    ptx::store_shared_4(list.keys + 4 * place, Score::key(Score::bits(word, static_cast<int>(at % Score::kPerWord))));
  }
}

template <class C, class List>
struct Candidates {
  using Bins = TopBins<C::kThreads, C::kDigitBits>;
  static constexpr u32 kEach = C::kAtOnce, kThreads = C::kThreads, kMost = kEach * kThreads, kRivals = C::kRivals;
  static constexpr int kDigitBits = C::kDigitBits;
  static_assert(kMost <= List::kRoom, "winners are put where keys were");

  const List& list;
  const Bins& bins;
  const u32 thread, rivals, rivals_listed;  // shared addresses of keys, then indices, and of their number, which is zero
  u32 keys[kEach], indices[kEach];          // no key is zero but of what is no candidate

  // Of the list of each block, `sizes` (shared address) of which are at most kEach times the threads that each gets.
  DSA_DEVICE void take_of_blocks(u32 sizes, u32 blocks) {
    const u32 shift = ptx::highest_bit(kThreads) - ptx::highest_bit(blocks), step = 1u << shift, block = thread >> shift, first = thread & (step - 1);
    const u32 size = ptx::load_shared_4(sizes + 4 * block), from = ptx::cluster_address(list.keys + 4 * first, static_cast<int>(block));
#pragma unroll
    for (u32 j = 0; j < kEach; ++j) {
      const bool wanted = first + j * step < size;
      keys[j] = ptx::load_cluster_4_if(wanted, from + 4 * step * j);
      indices[j] = ptx::load_cluster_4_if(wanted, from + 4 * step * j + (list.indices - list.keys));
    }
  }
  // Of this block's list.
  DSA_DEVICE void take_listed(u32 size) {
#pragma unroll
    for (u32 j = 0; j < kEach; ++j) {
      const u32 place = thread + j * kThreads;
      keys[j] = place < size ? ptx::load_shared_4(list.keys + 4 * place) : 0;
      indices[j] = place < size ? ptx::load_shared_4(list.indices + 4 * place) : 0;
    }
  }

  // The threshold of `t` with one digit more; `open_end`: keys beyond what it covers count as of the last digit, and if that is
  // the one, nobody knows where it ends: then `t`.
  DSA_DEVICE Threshold find(const Threshold& t, bool open_end) const {
    const int bits = least(t.shift, kDigitBits), rest = t.shift - bits;
    const u32 last = (1u << bits) - 1;
#pragma unroll
    for (u32 j = 0; j < kEach; ++j)  // what is no candidate is counted where nobody looks
      bins.count(keys[j] == 0 ? Bins::kBins : least((keys[j] - t.base) >> rest, last));
    ptx::block_sync();
    const typename Bins::Place place = bins.find(t.ties, false);
    return open_end && place.digit == last ? t : Threshold{t.base + (place.digit << rest), rest, place.ties, place.equal};
  }

  // Whether `put` selects what a threshold says, in whose digit no key is below the floor.
  static DSA_DEVICE bool few(const Threshold& t, u32 floor) { return t.base >= floor && (!t.open() || t.equal <= kRivals); }

  // Writes the k largest by a threshold with few in question. The list's size is zero, and a barrier has come since then.
  template <class Output>
  DSA_DEVICE void put(const Threshold& t, u32 k, const Output& output) const {
    const Bounds bounds(t, 0);
    u32 wins = 0, tied = 0;
#pragma unroll
    for (u32 j = 0; j < kEach; ++j) wins += bounds.wins(keys[j]), tied |= static_cast<u32>(bounds.tied(keys[j])) << j;
    u32 slot = list.reserve_by_warp(wins);
    if (tied != 0) {
#pragma unroll
      for (u32 j = 0; j < kEach; ++j)
        if ((tied >> j & 1) != 0) put_rival(ptx::shared_fetch_add(rivals_listed, 1), keys[j], indices[j]);
    }
#pragma unroll
    for (u32 j = 0; j < kEach; ++j)
      if (bounds.wins(keys[j])) ptx::store_shared_4(list.keys + 4 * slot++, indices[j]);
    ptx::block_sync();
    const u32 won = bounds.tie_size != 0 ? k - t.ties : k;
    if (bounds.tie_size != 0) put_rivals(t, won, output);
    for (slot = thread; slot < won; slot += 2 * kThreads) {
      const bool two = slot + kThreads < won;
      const u32 first = winner(slot), second = two ? winner(slot + kThreads) : first;
      const i32 id = output.translate(first), other = output.translate(second);
      output.store(slot, first, id);
      if (two) output.store(slot + kThreads, second, other);
    }
  }

 private:
  DSA_DEVICE u32 winner(u32 slot) const { return ptx::load_shared_4(list.keys + 4 * slot); }

  DSA_DEVICE void put_rival(u32 rival, u32 key, u32 index) const {
    ptx::store_shared_4(rivals + 4 * rival, key);
    ptx::store_shared_4(rivals + 4 * (kRivals + rival), index);
  }
  DSA_DEVICE u32 rival_key(u32 rival) const { return ptx::load_shared_4(rivals + 4 * rival); }
  DSA_DEVICE u32 rival_index(u32 rival) const { return ptx::load_shared_4(rivals + 4 * (kRivals + rival)); }

  // A warp finds how many rivals are before one of them, and that is its slot behind the winners'.
  template <class Output>
  DSA_DEVICE void put_rivals(const Threshold& t, u32 first_slot, const Output& output) const {
    const u32 lane = thread % 32;
#pragma unroll 1
    for (u32 rival = thread / 32; rival < t.equal; rival += kThreads / 32) {
      const u32 key = rival_key(rival), index = rival_index(rival);
      u32 before = 0;
      for (u32 other = lane; other < t.equal; other += 32)
        before += rival_key(other) > key || (rival_key(other) == key && rival_index(other) < index);
      before = ptx::warp_sum(before);
      if (before < t.ties && lane == 0) output.put(first_slot + before, index);
    }
  }
};

}  // namespace topk
