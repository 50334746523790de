// Exact top-k of rows that fit a block's shared memory, so that every score is read from global memory once.
//
//   row i       counted as its batches arrive, collected, selected from and written (row_select.cuh)
//   row i+1     copied asynchronously from when row i is not read any more
//
// A block takes every `row_step`-th row.
#pragma once
#include "prims/ptx/block.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "topk/output.cuh"
#include "topk/row.cuh"
#include "topk/row_select.cuh"
#include "topk/score.cuh"

namespace topk {

// A row that lies in shared memory, or is on its way there in `kBatches` batches.
template <class Score, class Copy, int kBatches>
struct SharedRow : ScoreRow<Score> {
  using Vector = ScoreVector<Score>;
  u32 words, landed, parity;  // shared addresses of the row and of the barriers of its batches, and their phase

  DSA_DEVICE SharedRow(const ScoreRow<Score>& row, u32 row_words, u32 barriers, u32 phase)
      : ScoreRow<Score>(row), words(row_words), landed(barriers), parity(phase) {}

  DSA_DEVICE Vector load_whole(u32 n) const { return this->vector_of(ptx::load_shared_16(words + 16 * n)); }

  DSA_DEVICE Vector load(u32 n) const {
    const u32 at = n * Vector::kElements;
    if (at >= this->end) return {{0, 0, 0, 0}, 0};
    Vector v = load_whole(n);
    if (!this->whole(n)) {
#pragma unroll
      for (u32 e = 0; e < Vector::kElements; ++e)
        if (at + e < this->first || at + e >= this->end) v.live &= ~(1u << e);
    }
    return v;
  }

  DSA_DEVICE u32 bits_at(u32 index) const {
    const u32 at = this->origin + index;
    return Score::bits(ptx::load_shared_4(words + 4 * (at / Score::kPerWord)), static_cast<int>(at % Score::kPerWord));
  }

  DSA_DEVICE void await(u32 batch) const { Copy::wait(batch, landed, parity); }
  DSA_DEVICE void await_all() const {
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) Copy::wait(batch, landed, parity);
  }
};

template <class C, class S, class Score, class Copy, int kBatches, class Params>
struct RowResident {
  using Row = ScoreRow<Score>;
  using Vector = typename Row::Vector;
  static constexpr int kThreads = C::kThreads, kDigitBits = C::kDigitBits, kKeyBits = Score::kKeyBits;
  static constexpr int kWords = C::kWords, kRowScores = kThreads * kWords * Score::kPerWord;
  static_assert(kBatches * 4 * C::kInFlight == kWords, "a thread's vectors come in whole batches");

  static DSA_DEVICE void run(const Params& p, S& shared) {
    const u32 thread = static_cast<u32>(ptx::thread_index()), k = static_cast<u32>(p.k);
    const u32 rows = static_cast<u32>(p.rows), step = static_cast<u32>(p.row_step);
    const u32 words = ptx::shared_address(&shared.words[0]), landed = ptx::shared_address(&shared.landed[0]);
    const auto copy = [&](u32 row) {
      const Row scores(p, row);
      if (!scores.taken_unread(k)) Copy::start(scores, words, landed);
    };
    Copy::init(landed);
    u32 parity = 0;
    bool is_copied = false;  // whether the row's copy was started beside the row before
#pragma unroll 1
    for (u32 row = ptx::block_index(); row < rows; row += step) {
      ptx::block_sync();
      if (!is_copied) copy(row);
      is_copied = false;
      const Row scores(p, row);
      const RowOutput<Params> output(p, row);
      u32 count = scores.length();
      output.prefetch_table(count, thread, kThreads);
      if (scores.taken_unread(k)) {
        for (u32 i = thread; i < count; i += kThreads) output.put(i, i);
      } else {
        const SharedRow<Score, Copy, kBatches> held(scores, words, landed, parity);
        count = select_row<C>(held, k, output, shared, [&] {
          if (rows - row <= step) return;
          copy(row + step);
          is_copied = true;
        });
        parity ^= 1;
      }
      output.finish(row, count, thread, kThreads);
    }
  }
};

}  // namespace topk
