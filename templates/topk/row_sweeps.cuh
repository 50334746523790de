// Sweeps of a block over a row: counting digits, collecting elements, writing in index order. A row is anything with
// ScoreRow's members.
#pragma once
#include "prims/ptx/bits.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/funnel.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/scan.cuh"
#include "topk/bounded.cuh"
#include "topk/element_list.cuh"
#include "topk/output.cuh"
#include "topk/threshold.cuh"

namespace topk {

// A key that what is looked for probably reaches; 0 if there is none above -inf, or not with room in the list. `thin`: few
// keys are near it, in terms of a first digit.
struct Guess {
  u32 key;
  bool thin;
};

template <class C, class Row>
struct RowSweeps {
  using Vector = typename Row::Vector;
  using Score = typename Row::Score;
  static constexpr int kThreads = C::kThreads, kDigitBits = C::kDigitBits, kKeyBits = Score::kKeyBits, kElements = Vector::kElements;
  static constexpr int kInFlight = C::kInFlight;
  static_assert(kInFlight * kElements <= 32, "a bit for each element in flight");
  using Digits = DigitSearch<kThreads, kDigitBits>;

  const Row& row;
  const Digits& digits;

  // Whether all that is selected for sure and all that may be has room among `room` elements, and can be collected: the
  // k-th is a number above -inf, or keys are no numbers.
  static DSA_DEVICE bool can_list(const Threshold& t, u32 k, u32 floor, u32 room) {
    return k - t.ties + t.equal <= room && (!Score::kIsNumber || Bounds(t, floor).lowest() > kKeyOfNegInf >> (32 - kKeyBits));
  }

  // Whether the first digit is counted without its shift.
  static constexpr bool kRotated = Score::kIsNumber && kShiftIsOneDigit<kDigitBits>;

  // The threshold of the k largest of more than k keys, with as many digits as it takes for `room` elements to suffice.
  DSA_DEVICE Threshold find_threshold(u32 k, u32 room) const {
    Threshold t{0, kKeyBits, k, row.length()};
#pragma unroll 1
    do {
      const int bits = least(t.shift, kDigitBits);
      const bool first = t.shift == kKeyBits;
      first ? count<true>(t, bits) : count<false>(t, bits);
      ptx::block_sync();
      t = digits.next(t, bits, kRotated && first);
    } while (t.open() && t.shift > 0 && !can_list(t, k, row.floor, room));
    return t;
  }

  // What probably k keys of the row reach, and few more, by a sample of vectors from all over the row. Three barriers.
  DSA_DEVICE Guess guess(u32 k, u32 room) const {
    constexpr int kDigitShift = kKeyBits - kDigitBits, kVectors = C::kSampled;
    const u32 thread = static_cast<u32>(ptx::thread_index()), first = row.first_vector();
    // Of `each` vectors that a thread has in a sweep it takes one; long rows have several of each thread.
    const u32 each = (row.vectors() - first) / kThreads, vectors = each >= 8 * kVectors ? kVectors : 1, step = each / vectors;
    const u32 sampled = vectors * kThreads * kElements;
    if (step < 2 || k > row.length() / 4 || k > room) return {0, false};
    // So many of the sample that it would take a deviation of four times the usual for fewer than k of the row.
    const u32 share = sampled * k / row.length(), wanted = share + (4u << (ptx::highest_bit(share) + 1) / 2);
    if (wanted >= sampled || (row.length() / sampled + 1) * wanted > room) return {0, false};
    // Neighbours, but for pairs, take theirs far from each other.
    const u32 from = first + thread + (thread / 2 % 16 * step / 16) * kThreads;
    row.await_all();
    Vector v[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const u32 n = from + u * kThreads * step;
      if (u < static_cast<int>(vectors)) v[u] = row.whole(n) ? row.load_whole(n) : Vector{{0, 0, 0, 0}, 0};
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (u >= static_cast<int>(vectors)) break;
#pragma unroll
      for (int e = 0; e < kElements; ++e) count_score<true>(v[u].bits(e), {0, kKeyBits, 0, 0}, kDigitBits);
    }
    ptx::block_sync();
    const Threshold t = digits.next({0, kKeyBits, wanted, sampled}, kDigitBits, kRotated);
    // In units of 2^-kDigitBits of the digit: where it would lie if the digit's keys were spread evenly, and where it does
    // at the least for keys of which the lowest are as much as four times as frequent as the highest.
    constexpr u32 kOne = 1u << kDigitBits;
    const u32 even = ((t.equal - t.ties) << kDigitBits) / t.equal, part = even * (kOne + 3 * even) >> (kDigitBits + 2);
    const u32 key = t.base + (kDigitShift > kDigitBits ? part << (kDigitShift - kDigitBits) : part >> (kDigitBits - kDigitShift));
    return {key > kKeyOfNegInf >> (32 - kKeyBits) ? key : 0, (row.length() / sampled + 1) * t.equal <= C::kRivals};
  }

  // Counts the first digit of all keys.
  DSA_DEVICE void count_first() const { count<true>(Threshold{0, kKeyBits, 0, 0}, kDigitBits); }

  // Puts the indices of elements whose keys are not below `lowest`, which is above -inf where keys are numbers, into a list.
  // Its size is theirs, even if it has less room.
  template <class List>
  DSA_DEVICE void collect(u32 lowest, const List& list) const {
    constexpr int kBits = kInFlight * kElements;
    const float below = ptx::float_of(Score::kIsNumber ? number_below_key(lowest << (32 - kKeyBits)) : 0);
    const auto wanted_of = [&](const Vector& v) {
      u32 wanted = 0;
#pragma unroll
      for (int e = kElements - 1; e >= 0; --e) {
        // Of the difference the sign counts: numbers above `below` give a negative one, NaN does not.
        const u32 top = Score::kIsNumber ? ptx::bits_of(below - ptx::float_of(v.bits(e))) : v.bits(e) >= lowest ? 0x80000000u : 0;
        wanted = ptx::push_top_bit(wanted, top);
      }
      return wanted;
    };
    u32 held = 0, held_bits = 0, held_n = 0;  // bits of batches that are not listed yet
    sweep([&](const Vector (&v)[kInFlight], u32, u32 n, bool last) {
      if (held_bits == 0) held_n = n;
      u32 wanted = 0;
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) wanted |= wanted_of(v[u]) << u * kElements;
      held |= wanted << held_bits;
      held_bits += kBits;
      if (held_bits + kBits <= 32 && !last) return;
      put(held, list.reserve_by_warp(ptx::count_ones(held)), held_n, list);
      held = held_bits = 0;
    });
    at_the_ends([&](const Vector& v, u32 n) {
      const u32 wanted = wanted_of(v) & v.live;
      if (wanted != 0) put(wanted, list.reserve(ptx::count_ones(wanted)), n, list);
    });
  }

  // Calls put(slot, vector number, element) for each selected element, with slots in the order of the row, of which
  // there are `slots` at most; returns how many are selected. `sums` is the shared address of two sets of warp sums.
  template <class Put>
  DSA_DEVICE u32 emit(const Bounds& bounds, u32 ties_taken, u32 slots, u32 sums, Put put) const {
    const u32 thread = static_cast<u32>(ptx::thread_index()), vectors = row.vectors();
    const u32 most_ties = bounds.tie_size != 0 ? ties_taken : 0;
    u32 wins = 0, ties = 0, set = 0;  // of the blocks before; the set of warp sums to use
    row.await_all();
#pragma unroll 1
    for (u32 begin = row.first_vector(); begin < vectors && wins + least(ties, most_ties) < slots; begin += kThreads) {
      const u32 n = begin + thread;
      const Vector v = row.load(n);
      u32 win = 0, tie = 0, total;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const u32 key = Score::key(v.bits(e));
        win |= static_cast<u32>(bounds.wins(key)) << e;
        tie |= static_cast<u32>(bounds.tied(key)) << e;
      }
      win &= v.live, tie &= v.live;
      const u32 counts = ptx::count_ones(win) | ptx::count_ones(tie) << 16;
      const u32 before = tile::block_exclusive_sum<kThreads>(counts, sums + 4 * 32 * set, total);
      set ^= 1;
      u32 my_wins = wins + (before & 0xffff), my_ties = ties + (before >> 16);
      for (u32 left = win | tie; left != 0; left &= left - 1) {
        const u32 bit = left & (0u - left), e = ptx::count_ones(bit - 1), slot = my_wins + least(my_ties, most_ties);
        const bool wins_here = (win & bit) != 0;
        if (wins_here || my_ties < most_ties) put(slot, n, e);
        my_wins += wins_here, my_ties += !wins_here;
      }
      wins += total & 0xffff, ties += total >> 16;
    }
    return wins + least(ties, most_ties);
  }

 private:
  // Counts the next digit of the keys that are still in question, at first of all.
  template <bool kFirst>
  DSA_DEVICE void count(const Threshold& t, int bits) const {
    sweep([&](const Vector (&v)[kInFlight], u32 whole, u32, bool) {
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if ((whole >> u & 1) == 0) continue;
#pragma unroll
        for (int e = 0; e < kElements; ++e) count_score<kFirst>(v[u].bits(e), t, bits);
      }
    });
    at_the_ends([&](const Vector& v, u32) {
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if ((v.live >> e & 1) != 0) count_score<kFirst>(v.bits(e), t, bits);
    });
  }

  template <bool kFirst>
  DSA_DEVICE void count_score(u32 score, const Threshold& t, int bits) const {
    if constexpr (kFirst && kRotated) {
      digits.count_rotated(Score::unshifted(score) >> (32 - kDigitBits));
    } else if constexpr (kFirst) {
      digits.count(Score::key(score) >> (kKeyBits - kDigitBits));
    } else {
      const u32 key = Score::key(score);
      if (t.covers(key)) digits.count(t.digit(key, bits));
    }
  }

  // Lists elements of vectors n, n + kThreads, .., a bit each, from `place` on.
  template <class List>
  DSA_DEVICE void put(u32 wanted, u32 place, u32 n, const List& list) const {
#pragma unroll 1
    for (u32 left = wanted; left != 0; ++place) {
      const u32 at = ptx::highest_bit(left);
      left ^= 1u << at;
      if (place < List::kRoom) list.set(place, row.index(n + at / kElements * kThreads, at % kElements));
    }
  }

  // Calls act(vectors, whole, number of the first, last) for kInFlight vectors of each thread at a time, kThreads apart. Bit u
  // of `whole` says that vector u lies in the row with all its elements; others are lowest scores.
  template <class Act>
  DSA_DEVICE void sweep(Act act) const {
    const u32 thread = static_cast<u32>(ptx::thread_index());
    u32 batch = 0;
#pragma unroll 1
    for (u32 begin = row.first_vector(); begin < row.vectors(); begin += kInFlight * kThreads) {
      row.await(batch++);
      Vector v[kInFlight];
      u32 whole = (1u << kInFlight) - 1;
      if (row.whole(begin) && row.whole(begin + kInFlight * kThreads - 1)) {
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) v[u] = row.load_whole(begin + u * kThreads + thread);
      } else {
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          constexpr u32 kLowest = Score::kLowestWord;
          const u32 n = begin + u * kThreads + thread;
          v[u] = Vector{{kLowest, kLowest, kLowest, kLowest}, 0};
          if (row.whole(n)) {
            v[u] = row.load_whole(n);
          } else {
            whole ^= 1u << u;
          }
        }
      }
      act(v, whole, begin + thread, begin + kInFlight * kThreads >= row.vectors());
    }
  }

  // Calls act(vector, its number) for the first and the last vector where elements of them lie outside, in the thread that
  // has them in a sweep.
  template <class Act>
  DSA_DEVICE void at_the_ends(Act act) const {
    const u32 thread = static_cast<u32>(ptx::thread_index()), begin = row.first_vector(), end = row.vectors();
#pragma unroll 1
    for (u32 side = 0; side < 2; ++side) {
      const u32 n = side == 0 ? begin : end - 1;
      if (begin < end && (side == 0 || n != begin) && (n - begin) % kThreads == thread && !row.whole(n)) act(row.load(n), n);
    }
  }
};

}  // namespace topk
