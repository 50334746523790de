// Radix selection by a block: where the k-th largest key lies, a digit at a time.
#pragma once
#include "prims/ptx/atomic.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/reduce.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/scan.cuh"
#include "prims/types.cuh"
#include "topk/bounded.cuh"

namespace topk {

// What is known of the k-th largest key: it is one of `equal` keys in base .. base + 2^shift - 1. Selected are all above,
// and `ties` of these.
struct Threshold {
  u32 base;
  int shift;
  u32 ties, equal;

  DSA_DEVICE bool open() const { return ties < equal; }
  // Whether the next digit of a key is to be counted. (A shift by all 32 bits would be undefined.)
  DSA_DEVICE bool covers(u32 key) const { return shift == 32 || (key - base) >> shift == 0; }
  // The next digit of a key that is covered.
  DSA_DEVICE u32 digit(u32 key, int bits) const { return (key - base) >> (shift - bits); }
};

// A threshold as bounds on keys: keys from `win` on are selected, and of those from `tie` on for `tie_size` the first few.
// Keys below `floor` never are.
struct Bounds {
  u32 win, tie, tie_size;

  DSA_DEVICE Bounds(const Threshold& t, u32 floor) {
    const bool taken_whole = !t.open() || t.base < floor;
    tie = t.base;
    tie_size = taken_whole ? 0 : 1u << t.shift;  // of a threshold that is not open the shift may be 32
    win = most(t.base + tie_size, floor);
  }
  DSA_DEVICE bool wins(u32 key) const { return key >= win; }
  DSA_DEVICE bool tied(u32 key) const { return key - tie < tie_size; }
  // Keys below are out of the question.
  DSA_DEVICE u32 lowest() const { return tie_size != 0 ? tie : win; }
};

// The largest that is not above n.
constexpr int power_of_two(int n) { return n < 2 ? 1 : 2 * power_of_two(n / 2); }

// The digits' histogram and the search in it, by as many warps as divide it. Such a warp has kEach rows of 32 neighbouring
// bins, a lane a bin, and clears them once they have been read, so that the histogram is empty before and after each search.
// There is a bin more than there are digits: where digits are counted less one, digit 0 comes out as the largest.
template <int kThreads, int kDigitBits>
struct DigitSearch {
  static constexpr int kBins = 1 << kDigitBits, kWarps = power_of_two(kThreads / 32);
  static constexpr int kEach = kBins / (32 * kWarps);
  // Shared addresses: [kBins + 1] counts, [32] sums of warps, [4] what was found; and of this thread's first bin.
  const u32 histogram, warp_sums, found, own;
  const int lane, warp;

  // Shared addresses that stay in registers: nvcc 13.0 works others out anew at each use, here for each key, from a
  // special register.
  template <class S>
  DSA_DEVICE explicit DigitSearch(S& shared)
      : histogram(ptx::shuffle(ptx::shared_address(&shared.histogram[0]), 0)),
        warp_sums(ptx::shared_address(&shared.warp_sums[0][0])), found(ptx::shared_address(&shared.found[0])),
        own(histogram + 4 * first_bin()), lane(ptx::thread_index() % 32), warp(ptx::thread_index() / 32) {}

  // Once, before the first count; a barrier must follow.
  DSA_DEVICE void clear() const {
    if (warp < kWarps) clear_own(false);
    if (ptx::thread_index() == 0) ptx::store_shared_4(histogram + 4 * kBins, 0);
  }

  DSA_DEVICE void count(u32 digit) const { ptx::shared_add(histogram + 4 * digit, 1); }
  // Of a digit that is counted less one, modulo kBins.
  DSA_DEVICE void count_rotated(u32 digit) const { ptx::shared_add(histogram + 4 + 4 * digit, 1); }
  // How often a digit was counted.
  DSA_DEVICE u32 counted(u32 digit, bool rotated) const {
    return ptx::load_shared_4(histogram + 4 * (rotated && digit == 0 ? kBins : digit));
  }

  // The threshold with one more digit of `bits` bits, those of all keys that it covers having been counted; `rotated`: by
  // count_rotated. All threads come here; two barriers.
  DSA_DEVICE Threshold next(const Threshold& t, int bits, bool rotated = false) const {
    u32 of_warp = 0;
    if (warp < kWarps) {
      u32 sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += ptx::load_shared_4(address(i, rotated));
      of_warp = ptx::warp_sum(sum);
      if (lane == 0) ptx::store_shared_4(warp_sums + 4 * warp, of_warp);
    }
    ptx::block_sync();
    if (warp < kWarps) {
      // Warps have the bins from the largest digit down: what the warps before have is above.
      const u32 above = ptx::warp_sum(lane < warp ? ptx::load_shared_4(warp_sums + 4 * lane) : 0);
      if (above < t.ties && t.ties <= above + of_warp) find(t, rotated, above);
      clear_own(rotated);
    }
    ptx::block_sync();
    const Words4 w = ptx::load_shared_16(found);
    return {t.base + (w.x << (t.shift - bits)), t.shift - bits, w.y, w.z};
  }

 private:
  // In the one warp that has the bin: first the row, then the lane.
  DSA_DEVICE void find(const Threshold& t, bool rotated, u32 above) const {
    u32 count = 0, row = 0;
#pragma unroll 1
    for (u32 from = 0; row < kEach; ++row) {
      count = ptx::load_shared_4(row == kEach - 1 ? address(kEach - 1, rotated) : own - from);
      const u32 of_row = ptx::warp_sum(count);
      if (t.ties <= above + of_row) break;
      above += of_row, from += 4 * 32;
    }
    above += tile::warp_inclusive_sum(count, lane) - count;
    if (above < t.ties && t.ties <= above + count)
      ptx::store_shared_16(found, Words4{first_bin() - 32 * row, t.ties - above, count, 0});
  }

  DSA_DEVICE void clear_own(bool rotated) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) ptx::store_shared_4(address(i, rotated), 0);
  }

  // Of this thread's i-th bin, from the largest digit down.
  DSA_DEVICE u32 address(int i, bool rotated) const {
    const bool is_zero = i == kEach - 1 && own == histogram + 4 * 32 * (kEach - 1);
    return own - 4 * 32 * i + (rotated && is_zero ? 4 * kBins : 0);
  }
  static DSA_DEVICE u32 first_bin() {
    const u32 thread = static_cast<u32>(ptx::thread_index());
    return kBins - 1 - thread / 32 * kEach * 32 - thread % 32;
  }
};

}  // namespace topk
