// Radix selection by a block: where the k-th largest key lies, a digit at a time.
#pragma once
#include "prims/ptx/atomic.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/reduce.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/scan.cuh"
#include "prims/types.cuh"

namespace topk {

template <class T>
DSA_DEVICE T least(T a, T b) {
  return a < b ? a : b;
}

// What is known of the k-th largest key. Selected are the keys whose bits from `shift` on exceed `prefix`, and `ties` of
// the `equal` ones that equal it there.
struct Threshold {
  u32 prefix;
  int shift;
  u32 ties, equal;

  DSA_DEVICE bool open() const { return ties < equal; }
  DSA_DEVICE u32 first() const { return shift == 32 ? 0 : prefix << shift; }
  // Whether the next digit of a key is to be counted. (A shift by all 32 bits would be undefined.)
  DSA_DEVICE bool covers(u32 key) const { return shift == 32 || key >> shift == prefix; }
  DSA_DEVICE u32 digit(u32 key, int bits) const { return key >> (shift - bits) & ((1u << bits) - 1); }
};

// A threshold as bounds on keys: keys from `win` on are selected, and of those from `tie` on for `tie_size` the first few.
// Keys below `floor` never are.
struct Bounds {
  u32 win, tie, tie_size;

  DSA_DEVICE Bounds(const Threshold& t, u32 floor) {
    const u32 first = t.first(), size = 1u << t.shift;
    const bool taken_whole = !t.open() || first < floor;
    win = !taken_whole ? first + size : first < floor ? floor : first;
    tie = first;
    tie_size = taken_whole ? 0 : size;
  }
  DSA_DEVICE bool wins(u32 key) const { return key >= win; }
  DSA_DEVICE bool tied(u32 key) const { return key - tie < tie_size; }
  // Keys below are out of the question.
  DSA_DEVICE u32 lowest() const { return tie_size != 0 ? tie : win; }
};

// The digits' histogram and the search in it. A thread owns a few neighbouring bins and clears them once it has read them,
// so that the histogram is empty before and after each search.
template <int kThreads, int kDigitBits>
struct DigitSearch {
  static constexpr int kBins = 1 << kDigitBits, kEach = (kBins + kThreads - 1) / kThreads;
  // Shared addresses: [kBins] counts, [32] sums of warps, [4] what was found.
  const u32 histogram, warp_sums, found;

  // Shared addresses that stay in registers: nvcc 13.0 works others out anew at each use, here for each key, from a
  // special register.
  template <class S>
  DSA_DEVICE explicit DigitSearch(S& shared)
      : histogram(ptx::shuffle(ptx::shared_address(&shared.histogram[0]), 0)),
        warp_sums(ptx::shared_address(&shared.warp_sums[0][0])), found(ptx::shared_address(&shared.found[0])) {}

  // Once, before the first count; a barrier must follow.
  DSA_DEVICE void clear() const {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (bin(i) >= 0) ptx::store_shared_4(histogram + 4 * bin(i), 0);
  }

  DSA_DEVICE void count(u32 digit) const { ptx::shared_add(histogram + 4 * digit, 1); }

  // The threshold with one more digit of `bits` bits, those of all keys that it covers having been counted; `rotated`: as
  // digits less one. All threads come here; two barriers.
  DSA_DEVICE Threshold next(const Threshold& t, int bits, bool rotated = false) const {
    const int lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
    u32 counts[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      counts[i] = bin(i) >= 0 ? ptx::load_shared_4(histogram + 4 * (bin(i) - (rotated ? 1 : 0) & (kBins - 1))) : 0;
      sum += counts[i];
    }
    const u32 of_warp = ptx::warp_sum(sum);
    if (lane == 0) ptx::store_shared_4(warp_sums + 4 * warp, of_warp);
    ptx::barrier_sync(0, kThreads);
    clear();
    // Warps have the bins from the largest digit down: what the warps before have is above.
    const u32 above_warp = ptx::warp_sum(lane < warp ? ptx::load_shared_4(warp_sums + 4 * lane) : 0);
    if (above_warp < t.ties && t.ties <= above_warp + of_warp) {
      u32 above = above_warp + tile::warp_inclusive_sum(sum, lane) - sum;
      bool sought = above < t.ties && t.ties <= above + sum;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (sought && above + counts[i] >= t.ties) {
          ptx::store_shared_16(found, Words4{static_cast<u32>(bin(i)), t.ties - above, counts[i], 0});
          sought = false;
        }
        above += counts[i];
      }
    }
    ptx::barrier_sync(0, kThreads);
    const Words4 w = ptx::load_shared_16(found);
    return {t.prefix << bits | w.x, t.shift - bits, w.y, w.z};
  }

 private:
  // This thread's bins, from the largest digit down.
  static DSA_DEVICE int bin(int i) { return kBins - 1 - ptx::thread_index() * kEach - i; }
};

}  // namespace topk
