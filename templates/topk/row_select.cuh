// Exact top-k of a row by one block: a radix select over the scores' keys, then one sweep that emits in index order.
//
//   level 0     sweep the row: histogram of the key's first digit        -> the digit of the k-th largest key
//   level 1     sweep the row: histogram of the second digit under it    -> the prefix grows
//               keys under the prefix are kept in shared memory, if all of them have room
//   level 2..   the same from shared memory; where there was no room, from the row again
//   emit        sweep the row: what exceeds the prefix, and of what equals it the first few, each to the slot that a
//               prefix sum over the block gives it
//
// Levels end early once everything under the prefix is selected. Whether keys have room is known before the sweep, from
// the histogram, so nothing is ever cut off: the buffer decides how fast, never what. The result depends on the scores
// only, and equal scores are taken in order of their index.
//
// One barrier (0, all threads) orders everything: after a histogram is cleared, after it is filled, within and after the
// search for the digit, and once in each block of the emitting sweep, whose warp sums alternate between two sets.
#pragma once
#include "prims/ptx/atomic.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/scan.cuh"
#include "topk/output.cuh"
#include "topk/row.cuh"
#include "topk/score.cuh"

namespace topk {

// Selected are the keys whose bits from `shift` on exceed `prefix`, and the first `ties` of those that equal it.
struct Threshold {
  u32 prefix;
  int shift;
  u32 ties;
  u32 equal;  // how many keys equal it
};

template <class C, class S, class Score, class Params>
struct RowSelect {
  using Row = ScoreRow<Score>;
  using Vector = typename Row::Vector;
  static constexpr int kThreads = C::kThreads, kDigitBits = C::kDigitBits, kKeyBits = Score::kKeyBits;
  static constexpr int kLevels = (kKeyBits + kDigitBits - 1) / kDigitBits;
  static constexpr int kInFlight = C::kInFlight;
  // With two levels nothing is left to do from kept keys.
  static constexpr bool kKeeps = kLevels > 2;

  static DSA_DEVICE void run(const Params& p, S& shared) {
    const u32 row = ptx::block_index(), thread = static_cast<u32>(ptx::thread_index());
    const u32 k = static_cast<u32>(p.k);
    const Row scores(p, row);
    const RowOutput<Params> output(p, row);
    const bool all = scores.length() <= k;
    u32 count = scores.length();
    if (all && !scores.drops_neg_inf) {
      for (u32 i = thread; i < count; i += kThreads) output.put(i, i);
    } else {
      // With room for all, all but key 0 are selected.
      const Threshold threshold = all ? Threshold{0, 0, 0, 0} : find_threshold(scores, k, shared);
      count = emit(scores, threshold, k, output, shared);
    }
    output.finish(row, count, thread, kThreads);
  }

 private:
  static DSA_DEVICE Threshold find_threshold(const Row& scores, u32 k, S& shared) {
    Threshold t{0, kKeyBits, k, scores.length()};
    u32 kept_keys = 0;  // in shared memory; among them all that are under the prefix, unless there are none
#pragma unroll 1
    for (int level = 0; level < kLevels && t.ties < t.equal; ++level) {
      const int bits = t.shift < kDigitBits ? t.shift : kDigitBits;
      clear(shared, bits);
      if (level == 0) {
        sweep<true, false>(scores, t, bits, shared);
      } else if (!count_kept(kept_keys, t, bits, shared)) {
        const bool keeps = kKeeps && level + 1 < kLevels && t.equal <= static_cast<u32>(C::kCandidates);
        keeps ? sweep<false, kKeeps>(scores, t, bits, shared) : sweep<false, false>(scores, t, bits, shared);
        if (keeps) kept_keys = t.equal;
      }
      ptx::barrier_sync(0, kThreads);
      t = find_digit(t, bits, shared);
    }
    return t;
  }

  static DSA_DEVICE void clear(S& shared, int bits) {
    const u32 histogram = ptx::shared_address(&shared.histogram[0]);
    const int thread = ptx::thread_index();
    for (int bin = thread; bin < 1 << bits; bin += kThreads) ptx::store_shared_4(histogram + 4 * bin, 0);
    if constexpr (kKeeps) {
      if (thread == 0) ptx::store_shared_4(ptx::shared_address(&shared.kept[0]), 0);
    }
    ptx::barrier_sync(0, kThreads);
  }

  static DSA_DEVICE void count_key(u32 key, const Threshold& t, int bits, u32 histogram) {
    ptx::shared_add(histogram + 4 * (key >> (t.shift - bits) & ((1u << bits) - 1)), 1);
  }

  // A shared address that stays in a register: nvcc 13.0 works others out anew at each use, here for each key, from a
  // special register.
  static DSA_DEVICE u32 held_address(const void* object) { return ptx::shuffle(ptx::shared_address(object), 0); }

  // Counts the next digit of the row's keys under the prefix (of all keys at first), and keeps the keys if asked to.
  template <bool kFirst, bool kKeep>
  static DSA_DEVICE void sweep(const Row& scores, const Threshold& t, int bits, S& shared) {
    const u32 histogram = held_address(&shared.histogram[0]), thread = static_cast<u32>(ptx::thread_index());
    const u32 vectors = scores.vectors();
#pragma unroll 1
    for (u32 begin = 0; begin < vectors; begin += kInFlight * kThreads) {
      Vector v[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) v[u] = scores.load(begin + u * kThreads + thread);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
        for (int e = 0; e < Vector::kElements; ++e) {
          const u32 key = scores.key(v[u], e);
          const bool counts = v[u].holds(e) && (kFirst || key >> t.shift == t.prefix);
          if (counts) count_key(key, t, bits, histogram);
          if constexpr (kKeep) keep(counts, key, shared);
        }
      }
    }
  }

  // Warps append their keys in any order: they are only counted. There is room for all.
  static DSA_DEVICE void keep(bool wanted, u32 key, S& shared) {
    const u32 lanes = ptx::ballot(wanted);
    if (lanes == 0) return;
    const int lane = ptx::thread_index() % 32;
    u32 slot = 0;
    if (lane == 0) slot = ptx::shared_fetch_add(ptx::shared_address(&shared.kept[0]), ptx::count_ones(lanes));
    slot = ptx::shuffle(slot, 0) + ptx::count_ones(lanes & ((1u << lane) - 1));
    if (wanted) ptx::store_shared_4(ptx::shared_address(&shared.candidates[0]) + 4 * slot, key);
  }

  // Counts the next digit of kept keys; false if there are none.
  static DSA_DEVICE bool count_kept(u32 keys, const Threshold& t, int bits, S& shared) {
    if constexpr (kKeeps) {
      const u32 histogram = ptx::shared_address(&shared.histogram[0]), candidates = ptx::shared_address(&shared.candidates[0]);
      for (u32 i = static_cast<u32>(ptx::thread_index()); i < keys; i += kThreads) {
        const u32 key = ptx::load_shared_4(candidates + 4 * i);
        if (key >> t.shift == t.prefix) count_key(key, t, bits, histogram);
      }
    }
    return keys != 0;
  }

  // The digit of the `ties`-th largest key under the prefix, from the histogram of that digit.
  static DSA_DEVICE Threshold find_digit(const Threshold& t, int bits, S& shared) {
    const u32 histogram = ptx::shared_address(&shared.histogram[0]), found = ptx::shared_address(&shared.found[0]);
    const int bins = 1 << bits, each = (bins + kThreads - 1) / kThreads;
    const int top = bins - 1 - ptx::thread_index() * each;  // a thread has bins top, top - 1, ..
    u32 sum = 0, total;
    for (int bin = top; bin > top - each && bin >= 0; --bin) sum += ptx::load_shared_4(histogram + 4 * bin);
    u32 above = tile::block_exclusive_sum<kThreads>(sum, ptx::shared_address(&shared.warp_sums[0][0]), total);
    if (above < t.ties && t.ties <= above + sum) {
      for (int bin = top;; --bin) {
        const u32 count = ptx::load_shared_4(histogram + 4 * bin);
        if (above + count >= t.ties) {
          ptx::store_shared_4(found, static_cast<u32>(bin));
          ptx::store_shared_4(found + 4, t.ties - above);
          ptx::store_shared_4(found + 8, count);
          break;
        }
        above += count;
      }
    }
    ptx::barrier_sync(0, kThreads);
    return {t.prefix << bits | ptx::load_shared_4(found), t.shift - bits, ptx::load_shared_4(found + 4), ptx::load_shared_4(found + 8)};
  }

  // Writes the selected elements in index order and returns how many there are.
  static DSA_DEVICE u32 emit(const Row& scores, const Threshold& t, u32 k, const RowOutput<Params>& output, S& shared) {
    const u32 warp_sums = ptx::shared_address(&shared.warp_sums[0][0]), thread = static_cast<u32>(ptx::thread_index());
    const u32 vectors = scores.vectors();
    u32 wins = 0, ties = 0, set = 0;  // of the blocks before; the set of warp sums to use
#pragma unroll 1
    for (u32 begin = 0; begin < vectors && wins + least(ties, t.ties) < k; begin += kInFlight * kThreads) {
      Vector v[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) v[u] = scores.load(begin + u * kThreads + thread);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        u32 win = 0, tie = 0;  // elements, as bits
#pragma unroll
        for (int e = 0; e < Vector::kElements; ++e) {
          const u32 key = scores.key(v[u], e);
          const bool live = v[u].holds(e) && !(scores.drops_neg_inf && key == 0);
          win |= static_cast<u32>(live && key >> t.shift > t.prefix) << e;
          tie |= static_cast<u32>(live && key >> t.shift == t.prefix) << e;
        }
        u32 total;
        const u32 counts = ptx::count_ones(win) | ptx::count_ones(tie) << 16;
        const u32 before = tile::block_exclusive_sum<kThreads>(counts, warp_sums + 4 * 32 * set, total);
        set ^= 1;
        const u32 index = (begin + u * kThreads + thread) * Vector::kElements - scores.first;
        put_vector(win, tie, wins + (before & 0xffff), ties + (before >> 16), t.ties, index, output);
        wins += total & 0xffff, ties += total >> 16;
      }
    }
    return wins + least(ties, t.ties);
  }

  // `wins` and `ties` count what comes before the vector; `index` is that of its first element.
  static DSA_DEVICE void put_vector(u32 win, u32 tie, u32 wins, u32 ties, u32 most_ties, u32 index, const RowOutput<Params>& output) {
    for (u32 left = win | tie; left != 0; left &= left - 1) {
      const u32 bit = left & (0u - left), e = ptx::count_ones(bit - 1);
      if ((win & bit) != 0) {
        output.put(wins + least(ties, most_ties), index + e);
        ++wins;
      } else {
        if (ties < most_ties) output.put(wins + ties, index + e);
        ++ties;
      }
    }
  }

  static DSA_DEVICE u32 least(u32 a, u32 b) { return a < b ? a : b; }
};

}  // namespace topk
