// A guess at what the k largest of a row reach, as RowSweeps::guess makes it, in steps: vectors are on their way while other
// things are done.
#pragma once
#include "prims/ptx/bits.cuh"
#include "prims/ptx/thread.cuh"
#include "topk/row_sweeps.cuh"
#include "topk/score.cuh"
#include "topk/top_bins.cuh"

namespace topk {

template <class C, class Row>
struct RowSample {
  using Score = typename Row::Score;
  using Vector = typename Row::Vector;
  using Bins = TopBins<C::kThreads, C::kDigitBits>;
  static constexpr u32 kThreads = C::kThreads, kVectors = C::kSampled, kElements = Row::kElements;
  static constexpr int kDigitBits = C::kDigitBits, kDigitShift = Score::kKeyBits - kDigitBits;
  static_assert(Score::kIsNumber && kShiftIsOneDigit<kDigitBits>, "digits are counted without their shift");

  const Row& row;
  const u32 k, room;
  u32 vectors, step;  // that each thread takes, and how many of a thread's in a sweep there are to one of them; 0: none are taken
  Vector v[kVectors];

  // Asks for the vectors. The window begins in the row's first one.
  DSA_DEVICE RowSample(const Row& of, u32 slots, u32 most_listed) : row(of), k(slots), room(most_listed) {
    const u32 each = row.vectors() / kThreads;
    vectors = each >= 8 * kVectors ? kVectors : 1;
    step = vectors == kVectors ? each / kVectors : each;
    if (step < 2 || k > row.length() / 4 || k > room) step = 0;
    const u32 thread = static_cast<u32>(ptx::thread_index()), from = thread + (thread / 2 % 16 * step / 16) * kThreads;
#pragma unroll
    for (u32 u = 0; u < kVectors; ++u) {
      const u32 n = from + u * kThreads * step;
      v[u] = step != 0 && u < vectors && row.whole(n) ? row.load_whole(n) : Vector{{0, 0, 0, 0}, 0};
    }
  }

  // All threads come here; the bins are empty, and a barrier has come since. Three barriers.
  DSA_DEVICE Guess guess(const Bins& bins) const {
    if (step == 0) return {0, false};
    const u32 sampled = vectors * kThreads * kElements, part = (row.length() >> ptx::highest_bit(sampled)) + 1;
    // So many of the sample that it would take a deviation of four times the usual for fewer than k of the row.
    const u32 share = sampled * k / row.length(), wanted = share + (4u << (ptx::highest_bit(share) + 1) / 2);
    if (wanted >= sampled || part * wanted > room) return {0, false};
#pragma unroll
    for (u32 u = 0; u < kVectors; ++u) {
      if (u >= vectors) break;
#pragma unroll
      for (int e = 0; e < static_cast<int>(kElements); ++e) bins.count(Score::unshifted(v[u].bits(e)) >> (32 - kDigitBits));
    }
    ptx::block_sync();
    // NaN, which is lowest, has the largest digit of those without shift.
    const typename Bins::Place place = bins.find(wanted, true);
    if (place.equal == 0) return {0, false};
    // In units of 2^-kDigitBits of the digit: where it would lie if the digit's keys were spread evenly, and where it does
    // at the least for keys of which the lowest are as much as four times as frequent as the highest.
    constexpr u32 kOne = 1u << kDigitBits;
    const u32 even = ((place.equal - place.ties) << kDigitBits) / place.equal, within = even * (kOne + 3 * even) >> (kDigitBits + 2);
    const u32 key = (place.digit + 1) << kDigitShift | (kDigitShift > kDigitBits ? within << (kDigitShift - kDigitBits) : within >> (kDigitBits - kDigitShift));
    return {key > kKeyOfNegInf >> (32 - Score::kKeyBits) ? key : 0, part * place.equal <= C::kRivals};
  }
};

}  // namespace topk
