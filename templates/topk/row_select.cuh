// Exact top-k of one row by a block: sweeps over it, then a selection among the few elements that the sweeps leave.
//
//   digit 0     sweep: histogram of the keys' first digit -> the digit of the k-th largest key
//   digit 1..   the same under the digits found, as long as what may be selected has no room in the list
//   collect     sweep: elements that are or may be selected go to the list
//   select      digits from the list, then by index among equals; what is selected is written
//
// Whether there is room is known before the sweep, from the histogram, so nothing is ever cut off: the list decides how
// fast, never what. If a key that has no further digits has more equals than the list has room for, a last sweep in index
// order writes the selected elements directly. The result depends on the scores only.
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
  const typename Sweeps::Digits digits(shared);
  const List list(shared, digits);
  const Sweeps sweeps{row, digits};
  list.clear();
  digits.clear();
  ptx::block_sync();
  // With room for all, everything from the floor on is selected.
  const Threshold t = row.length() <= k ? Threshold{0, 0, k, row.length()} : sweeps.find_threshold(k, List::kRoom);
  const Bounds bounds(t, row.floor);
  if (Sweeps::can_list(t, k, row.floor, List::kRoom)) {
    sweeps.collect(bounds, list);
    ptx::block_sync();
    return list.select(t, k, row, output, after_row);
  }
  const u32 sums = ptx::shared_address(&shared.warp_sums[0][0]);
  return sweeps.emit(bounds, t.ties, k, sums, [&](u32 slot, u32 n, u32 e) { output.put(slot, row.index(n, e)); });
}

}  // namespace topk
