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

// The digits' histogram and the search in it, by a few of the block's warps: the others would only wait for each other.
// Such a warp has kEach rows of 32 neighbouring bins, a lane a bin, and clears them once they have been read, so that the
// histogram is empty before and after each search.
template <int kThreads, int kDigitBits>
struct DigitSearch {
  static constexpr int kBins = 1 << kDigitBits, kSearching = kThreads < 256 ? kThreads : 256;
  static constexpr int kEach = (kBins + kSearching - 1) / kSearching, kWarps = kSearching / 32;
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
    if (ptx::thread_index() < kSearching) clear_own(false);
  }

  DSA_DEVICE void count(u32 digit) const { ptx::shared_add(histogram + 4 * digit, 1); }

  // The threshold with one more digit of `bits` bits, those of all keys that it covers having been counted; `rotated`: as
  // digits less one. All threads come here; two barriers.
  DSA_DEVICE Threshold next(const Threshold& t, int bits, bool rotated = false) const {
    const int lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32;
    const bool searches = warp < kWarps;
    u32 of_warp = 0;
    if (searches) {
      u32 sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += counted(i, rotated);
      of_warp = ptx::warp_sum(sum);
      if (lane == 0) ptx::store_shared_4(warp_sums + 4 * warp, of_warp);
    }
    ptx::barrier_sync(0, kThreads);
    if (searches) {
      // Warps have the bins from the largest digit down: what the warps before have is above.
      const u32 above = ptx::warp_sum(lane < warp ? ptx::load_shared_4(warp_sums + 4 * lane) : 0);
      if (above < t.ties && t.ties <= above + of_warp) find(t, rotated, above, lane);
      clear_own(rotated);
    }
    ptx::barrier_sync(0, kThreads);
    const Words4 w = ptx::load_shared_16(found);
    return {t.prefix << bits | w.x, t.shift - bits, w.y, w.z};
  }

 private:
  // In the one warp that has the bin: first the row, then the lane.
  DSA_DEVICE void find(const Threshold& t, bool rotated, u32 above, int lane) const {
    u32 count = 0;
    int row = 0;
#pragma unroll 1
    for (;; ++row) {
      count = counted(row, rotated);
      const u32 of_row = ptx::warp_sum(count);
      if (t.ties <= above + of_row) break;
      above += of_row;
    }
    above += tile::warp_inclusive_sum(count, lane) - count;
    if (above < t.ties && t.ties <= above + count)
      ptx::store_shared_16(found, Words4{static_cast<u32>(bin(row)), t.ties - above, count, 0});
  }

  DSA_DEVICE void clear_own(bool rotated) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (bin(i) >= 0) ptx::store_shared_4(address(i, rotated), 0);
  }

  DSA_DEVICE u32 counted(int i, bool rotated) const { return bin(i) >= 0 ? ptx::load_shared_4(address(i, rotated)) : 0; }
  DSA_DEVICE u32 address(int i, bool rotated) const { return histogram + 4 * (bin(i) - (rotated ? 1 : 0) & (kBins - 1)); }

  // The i-th bin of one of the threads that search, from the largest digit down.
  static DSA_DEVICE int bin(int i) {
    return kBins - 1 - (ptx::thread_index() / 32 * kEach + i) * 32 - ptx::thread_index() % 32;
  }
};

}  // namespace topk
