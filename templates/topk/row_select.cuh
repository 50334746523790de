// Exact top-k of one row by a block: sweeps over it, then a selection among the few elements that the sweeps leave.
//
//   guess       from a sample: a key that probably k keys reach, and few more
//   collect     sweep: elements that reach it go to the list
//   select      digits from the list, then all against all among few; what is selected is written
//
// If the list has less than k elements, or no room for all, or there is no such key:
//
//   digit 0     sweep: histogram of the keys' first digit -> the digit of the k-th largest key
//   digit 1..   the same under the digits found, as long as what may be selected has no room in the list
//   collect     sweep: elements that are or may be selected go to the list
//   select      as above
//
// If a key that has no further digits has more equals than the list has room for, a last sweep in index order writes the
// selected elements directly. So nothing is ever cut off: guess and list decide how fast, never what. The result depends
// on the scores only.
//
// Barrier 0, all threads, after each phase; those of the selection are in element_list.cuh.
#pragma once
#include "prims/ptx/block.cuh"
#include "prims/ptx/thread.cuh"
#include "topk/element_list.cuh"
#include "topk/output.cuh"
#include "topk/row_sweeps.cuh"
#include "topk/threshold.cuh"

namespace topk {

// Writes the selected elements of `row`, which has more than k scores or may drop some, and returns how many there are.
// `after_row` is called as soon as the block does not read the row any more, if that is long before the end.
template <class C, class Row, class S, class Output, class After>
DSA_DEVICE u32 select_row(const Row& row, u32 k, const Output& output, S& shared, After after_row) {
  constexpr int kThreads = C::kThreads;
  using Sweeps = RowSweeps<C, Row>;
  using List = ElementList<C, S, kThreads, C::kDigitBits>;
  const u32 thread = static_cast<u32>(ptx::thread_index());
  const typename Sweeps::Digits digits(shared);
  const List list(shared, digits);
  const Sweeps sweeps{row, digits};
  list.clear();
  digits.clear();
  ptx::block_sync();
  const u32 length = row.length();
  // With room for all, everything from the floor on is selected.
  Threshold t{0, 0, k, length};
  const Guess guess = length <= k ? Guess{0, false} : sweeps.guess(k, List::kRoom);
  u32 lowest = guess.key;
  bool guessed = lowest != 0;
#pragma unroll 1
  for (;;) {
    if (guessed) {
      t = guess.thin ? Threshold{0, Sweeps::kKeyBits, k, length} : Threshold{lowest, C::kGuessShift + C::kDigitBits, k, length};
    } else {
      if (length > k) t = sweeps.find_threshold(k, List::kRoom);
      if (!Sweeps::can_list(t, k, row.floor, List::kRoom)) break;
      lowest = Bounds(t, row.floor).lowest();
    }
    sweeps.collect(lowest, list);
    ptx::block_sync();
    const u32 listed = list.size();
    if (!guessed || (k <= listed && listed <= List::kRoom)) {
      if (guessed) t.equal = listed;
      return list.select(t, guessed && !guess.thin, k, row, output, after_row);
    }
    guessed = false;
    ptx::block_sync();
    if (thread == 0) list.set_size(0);
  }
  const Bounds bounds(t, row.floor);
  const u32 sums = ptx::shared_address(&shared.warp_sums[0][0]);
  return sweeps.emit(bounds, t.ties, k, sums, [&](u32 slot, u32 n, u32 e) { output.put(slot, row.index(n, e)); });
}

}  // namespace topk
