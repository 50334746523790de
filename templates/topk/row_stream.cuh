// Exact top-k of rows of any length, one block a row, which it sweeps in global memory.
#pragma once
#include "prims/ptx/thread.cuh"
#include "topk/output.cuh"
#include "topk/row.cuh"
#include "topk/row_select.cuh"
#include "topk/score.cuh"

namespace topk {

template <class C, class S, class Score, class Params>
struct RowStream {
  using Row = ScoreRow<Score>;
  using Vector = typename Row::Vector;
  static constexpr int kThreads = C::kThreads, kDigitBits = C::kDigitBits, kKeyBits = Score::kKeyBits;

  static DSA_DEVICE void run(const Params& p, S& shared) {
    const u32 row = ptx::block_index(), thread = static_cast<u32>(ptx::thread_index()), k = static_cast<u32>(p.k);
    const Row scores(p, row);
    const RowOutput<Params> output(p, row);
    u32 count = scores.length();
    output.prefetch_table(count, thread, kThreads);
    if (scores.taken_unread(k)) {
      for (u32 i = thread; i < count; i += kThreads) output.put(i, i);
    } else {
      count = select_row<C>(scores, k, output, shared, [] {});
    }
    output.finish(row, count, thread, kThreads);
  }
};

}  // namespace topk
