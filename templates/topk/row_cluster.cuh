// Exact top-k of a few long rows in one launch: the blocks of a cluster share a row, and each holds its part in shared memory.
//
//   all      | copies start, sample asked for | guess | list, batch by batch | tell size | meet |
//   block 0  | lists of all to registers | digit | release | write
//   others   | one thread waits                             until their lists and scores are not read any more
//
//   guess    from a sample of the whole row, the same one in every block: a key that probably k keys reach, and few more
//   meet     the cluster's barrier. An arrival at the start says that a block runs, so that its memory may be written. All
//            arrivals but this wait until memory has what was written: so they are few.
//   release  block 0 arrives at a barrier of each other block
//
// If slots follow the indices, or lists or those in question have no room in registers, block 0 copies the lists behind its
// own and selects as from any list (element_list.cuh). If less than k elements reach the guess, or more than a list holds,
// or there is none, the threshold comes from the whole row:
//
//   all      | first digit of all keys | tell sums | meet | threshold | collect | tell size | meet |
//   block 0  | lists of all | their keys | release | select | write
//
// If what may be selected has no room in block 0's list, the next digit is counted as the first was. If a key without
// further digits still has too many equals, the blocks tell each other how many win and tie in their parts, and each
// writes its own in index order.
//
// Barrier 0, all threads of a block: lists are empty; those of the guess (row_sample.cuh); the part is listed; then as in
// cluster_candidates.cuh. Otherwise: the part is counted; the threshold is known; the part is listed; all lists are copied;
// then as in element_list.cuh.
#pragma once
#include "prims/ptx/bits.cuh"
#include "prims/ptx/block.cuh"
#include "prims/ptx/cluster.cuh"
#include "prims/ptx/cluster_barrier.cuh"
#include "prims/ptx/cluster_words.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "topk/cluster_candidates.cuh"
#include "topk/cluster_digits.cuh"
#include "topk/element_list.cuh"
#include "topk/output.cuh"
#include "topk/part_copy.cuh"
#include "topk/row.cuh"
#include "topk/row_resident.cuh"
#include "topk/row_sample.cuh"
#include "topk/row_sweeps.cuh"
#include "topk/score.cuh"
#include "topk/threshold.cuh"
#include "topk/top_bins.cuh"

namespace topk {

// A part that has arrived; what counts it has waited for each batch.
template <class Score, class Copy, int kBatches>
struct ArrivedRow : SharedRow<Score, Copy, kBatches> {
  using SharedRow<Score, Copy, kBatches>::SharedRow;
  DSA_DEVICE void await(u32) const {}
  DSA_DEVICE void await_all() const {}
};

// What of a row a selection from a list reads, from the shared memory of the block that holds it.
template <class ScoreType>
struct ClusterRow {
  using Score = ScoreType;

  u32 floor, count;
  u32 origin, each;  // where the window starts, and the scores of a part, counted from the row's first vector
  u32 words;         // shared address of a block's part

  DSA_DEVICE u32 length() const { return count; }
  DSA_DEVICE u32 bits_at(u32 index) const {
    const u32 at = origin + index, rank = at / each, own = at - rank * each;
    const u32 word = ptx::load_cluster_4(ptx::cluster_address(words + 4 * (own / Score::kPerWord), static_cast<int>(rank)));
    return Score::bits(word, static_cast<int>(own % Score::kPerWord));
  }
};

template <class C, class S, class Score, int kBatches, class Params>
struct RowCluster {
  using Row = ScoreRow<Score>;
  using Vector = typename Row::Vector;
  using Copy = PartCopy<C, kBatches>;
  using Held = ArrivedRow<Score, Copy, kBatches>;
  using Sweeps = RowSweeps<C, Held>;
  using Digits = typename Sweeps::Digits;
  using Output = RowOutput<Params>;
  static constexpr int kThreads = C::kThreads, kDigitBits = C::kDigitBits, kKeyBits = Score::kKeyBits;
  static constexpr int kWords = C::kWords, kRowScores = kThreads * kWords * Score::kPerWord;
  static constexpr u32 kAtOnce = C::kAtOnce;
  static_assert(4 * C::kInFlight * kBatches == kWords, "a thread's vectors come in whole batches");
  using List = ElementList<C, S, kThreads, kDigitBits>;
  using Bins = TopBins<kThreads, kDigitBits>;
  static constexpr u32 kNotSelected = 0xffffffffu;  // no count

  static DSA_DEVICE void run(const Params& p, S& shared) {
    const u32 blocks = ptx::cluster_blocks(), row = ptx::cluster_index(), rank = ptx::cluster_rank();
    const u32 thread = static_cast<u32>(ptx::thread_index());
    const Row scores(p, row);
    if (!scores.taken_unread(static_cast<u32>(p.k))) {
      const Held held(part_of(scores, rank, blocks), ptx::shared_address(&shared.words[0]), ptx::shared_address(&shared.landed[0]), 0);
      const Digits digits(shared);
      const List list(shared, digits);
      RowCluster{thread, static_cast<u32>(p.k), blocks, rank, ptx::shared_address(&shared.told[0][0]), ptx::shared_address(&shared.warp_sums[0][0]),
                 ptx::shared_address(&shared.rivals[0]), ptx::shared_address(&shared.released[0]), scores, held, digits, list, {digits, ptx::shared_address(&shared.group_sums[0][0]), blocks, rank}}.select(p, row);
    } else if (rank == 0) {
      const Output output(p, row);
#pragma unroll 1
      for (u32 i = thread; i < scores.length(); i += kThreads) output.put(i, i);
      output.finish(row, scores.length(), thread, kThreads);
    }
  }

  const u32 thread, k, blocks, rank;
  const u32 told, warp_sums, rivals, released;  // shared addresses; told: two numbers of each block; a barrier
  const Row& scores;
  const Held& held;
  const Digits& digits;
  const List& list;
  const ClusterDigits<kThreads, kDigitBits> search;

  // Scores of a part, but for those at the row's ends.
  static DSA_DEVICE u32 part_scores(const Row& row, u32 parts) {
    return ((row.vectors() + parts - 1) >> ptx::highest_bit(parts)) * Row::kElements;
  }

  // A part of a row that begins with its own first vector, with the row's indices.
  static DSA_DEVICE Row part_of(const Row& row, u32 part, u32 parts) {
    const u32 each = part_scores(row, parts), before = part * each, rest = before < row.end ? row.end - before : 0;
    Row out = row;
    out.base += before, out.origin -= before;
    out.first = part == 0 ? row.first : 0;
    out.end = most(out.first, least(rest, each));
    return out;
  }

  static DSA_DEVICE void meet() {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }

  // Of block 0, behind a barrier of its own after its last read of others' memory: lets them end.
  DSA_DEVICE void release_others() const {
    const u32 other = thread - (kThreads - 32);  // by the last warp
    if (other - 1 < blocks - 1) ptx::mbarrier_arrive_of_block(ptx::cluster_address(released, static_cast<int>(other)));
  }
  // Of the others, until that: it takes a thread for a block to stay.
  DSA_DEVICE void await_release() const {
    if (thread == 0) ptx::mbarrier_wait_for_block(released, 0);
  }

  DSA_DEVICE void select(const Params& p, u32 row) const {
    Copy::start(static_cast<const Row&>(held), held.words, held.landed);
    const bool takes_all = scores.length() <= k;
    const RowSample<C, Row> sample(scores, k, List::kRoom);
    digits.clear();
    if (blocks <= thread && thread < kMostBlocks) ptx::store_shared_4(told + 4 * thread, 0);
    if (thread < 4) ptx::store_shared_4(list.listed + 4 * thread, 0);
    if (thread == 0) ptx::mbarrier_init(released, 1);
    ptx::cluster_arrive_relaxed();
    ptx::block_sync();
    const Bins bins{thread, digits.histogram, warp_sums, digits.found};
    const Guess guess = sample.guess(bins);
    // Block 0 has most to do in the end.
    if (rank == blocks - 1) Output(p, row).prefetch_table(scores.length(), thread, kThreads);
    ptx::cluster_wait();
    u32 count = guess.key != 0 ? select_guessed(guess, bins, p, row) : kNotSelected;
    if (count == kNotSelected) {
      // With room for all, everything from the floor on is selected.
      const Threshold t = takes_all ? all_of_it() : find_threshold();
      const Output output(p, row);  // anew: there are no registers for it all the way
      count = Sweeps::can_list(t, k, scores.floor, List::kRoom) ? select_listed(t, output) : write_in_order(t, output);
    }
    if (rank == 0) Output(p, row).finish(row, count, thread, kThreads);
  }

  // How many block 0 selects among what reaches the guess; kNotSelected in every block if that are too few or too many.
  DSA_DEVICE u32 select_guessed(const Guess& guess, const Bins& bins, const Params& p, u32 row) const {
    list_places<C, Score, Copy>(held, held.words, held.landed, guess.key, list);
    ptx::block_sync();
    const u32 own = list.size();
    if (thread < blocks) ptx::store_cluster_4(ptx::cluster_address(told + 4 * rank, static_cast<int>(thread)), own);
    add_keys<C, Score>(held, held.words, least(own, List::kRoom), list);
    meet();
    if (thread == 0) list.set_size(0);
    static_assert(kMostBlocks == 8);
    const Words4 a = ptx::load_shared_16(told), b = ptx::load_shared_16(told + 16);
    const u32 listed = a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
    if (listed < k || listed > List::kRoom) return kNotSelected;
    u32 count = 0;
    if (rank == 0) {
      const u32 longest = most(most(most(a.x, a.y), most(a.z, a.w)), most(most(b.x, b.y), most(b.z, b.w)));
      count = select_candidates(guess, bins, listed, longest, Output(p, row));
    } else {
      await_release();
    }
    return count;
  }

  // Of block 0: how many of `listed` elements are selected.
  DSA_DEVICE u32 select_candidates(const Guess& guess, const Bins& bins, u32 listed, u32 longest, const Output& output) const {
    const Threshold all = guess.thin ? Threshold{0, kKeyBits, k, listed} : Threshold{guess.key, C::kGuessShift + kDigitBits, k, listed};
    using Few = Candidates<C, List>;
    if (!output.ordered && listed <= Few::kMost) {
      Few candidates{list, bins, thread, rivals, list.listed + 12};
      if (longest * blocks <= Few::kMost) {
        candidates.take_of_blocks(told, blocks);
      } else {
        gather_lists<true>();
        candidates.take_listed(listed);
        if (thread == 0) list.set_size(0);
      }
      const Threshold t = candidates.find(all, !guess.thin);
      if (t.shift != all.shift && Few::few(t, scores.floor)) {
        release_others();
        candidates.put(t, k, output);
        return k;
      }
    }
    list.clear();
    gather_lists<false>();
    return list.select(all, !guess.thin, k, cluster_row(), output, [&] { release_others(); });
  }

  DSA_DEVICE Threshold all_of_it() const {
#pragma unroll 1
    for (u32 batch = 0; batch < kBatches; ++batch) Copy::wait(batch, held.landed);
    return {0, 0, k, scores.length()};
  }

  DSA_DEVICE Threshold find_threshold() const {
    Threshold t{0, kKeyBits, k, scores.length()};
#pragma unroll 1
    for (;;) {
      const int bits = least(t.shift, kDigitBits);
      count_digit(t, bits);
      ptx::block_sync();
      search.tell();
      meet();
      t = search.find(t, bits);
      if (!t.open() || t.shift == 0 || Sweeps::can_list(t, k, scores.floor, List::kRoom)) return t;
      meet();  // no histogram is read any more
      digits.clear();
      ptx::block_sync();
    }
  }

  DSA_DEVICE void count_digit(const Threshold& t, int bits) const {
    const bool is_first = t.shift == kKeyBits;
#pragma unroll 1
    for (u32 batch = 0; batch * kThreads < held.vectors(); ++batch) {
      if (batch % C::kInFlight == 0) Copy::wait(batch / C::kInFlight, held.landed);
      const u32 n = batch * kThreads + thread;
      if (is_first && held.whole(n)) {
        const Vector v = held.load_whole(n);
#pragma unroll
        for (int e = 0; e < Vector::kElements; ++e) {
          if constexpr (Sweeps::kRotated) digits.count_rotated(Score::unshifted(v.bits(e)) >> (32 - kDigitBits));
          else digits.count(Score::key(v.bits(e)) >> (kKeyBits - kDigitBits));
        }
      } else {
        const Vector v = held.load(n);
#pragma unroll
        for (int e = 0; e < Vector::kElements; ++e) {
          const u32 key = Score::key(v.bits(e));
          if ((v.live >> e & 1) != 0 && t.covers(key)) digits.count(t.digit(key, bits));
        }
      }
    }
  }

  // Of block 0: how many are selected.
  DSA_DEVICE u32 select_listed(const Threshold& t, const Output& output) const {
    Sweeps{held, digits}.collect(Bounds(t, scores.floor).lowest(), list);
    ptx::block_sync();
    if (thread == 0) ptx::store_cluster_4(ptx::cluster_address(told + 4 * rank, 0), list.size());
    meet();
    u32 count = 0;
    if (rank == 0) {
      list.clear();
      gather_lists<false>();
      count = list.select(t, false, k, cluster_row(), output, [&] { release_others(); });
    } else {
      await_release();
    }
    return count;
  }

  DSA_DEVICE ClusterRow<Score> cluster_row() const {
    return {scores.floor, scores.length(), scores.origin, part_scores(scores, blocks), held.words};
  }

  // All that the blocks have listed to this one's list, behind its own: as many threads for each block.
  template <bool kWithKeys>
  DSA_DEVICE void gather_lists() const {
    static_assert((kThreads & (kThreads - 1)) == 0);
    const u32 shift = ptx::highest_bit(kThreads) - ptx::highest_bit(blocks), step = 1u << shift, block = thread >> shift;
    u32 before = 0, count = 0;
#pragma unroll
    for (u32 other = 0; other < kMostBlocks; ++other) {
      const u32 size = ptx::load_shared_4(told + 4 * other);
      before += other < block ? size : 0, count += size;
    }
    const u32 end = block == 0 ? 0 : ptx::load_shared_4(told + 4 * block);
#pragma unroll 1
    for (u32 begin = thread & (step - 1); begin < end; begin += kAtOnce * step) {
      u32 indices[kAtOnce], keys[kAtOnce];
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) {
        const u32 place = begin + j * step;
        indices[j] = ptx::load_of_block_4_if(place < end, list.indices + 4 * place, block);
        if (kWithKeys) keys[j] = ptx::load_of_block_4_if(place < end, list.keys + 4 * place, block);
      }
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) {
        const u32 place = begin + j * step;
        if (place >= end) break;
        list.set(before + place, indices[j]);
        if (kWithKeys) ptx::store_shared_4(list.keys + 4 * (before + place), keys[j]);
      }
    }
    if (thread == 0) list.set_size(count);
    digits.clear();
    ptx::block_sync();
  }

  // Each block what of its part is selected, in index order; how many the row has.
  DSA_DEVICE u32 write_in_order(const Threshold& t, const Output& output) const {
    const Bounds bounds(t, scores.floor);
    u32 wins = 0, first = 0, taken = 0, count = 0;
    // Those that win, those that tie with them, and then what is selected of these.
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
      const u32 found = Sweeps{held, digits}.emit(bounds, taken, pass < 2 ? 0xffffffffu : k, warp_sums, [&](u32 slot, u32 n, u32 e) {
        if (pass == 2) output.put(first + slot, held.index(n, e));
      });
      ptx::block_sync();
      if (pass == 0) {
        wins = found, taken = t.ties;
      } else if (pass == 1) {
        if (thread < blocks) {
          const u32 own = ptx::cluster_address(told + 4 * rank, static_cast<int>(thread));
          ptx::store_cluster_4(own, wins);
          ptx::store_cluster_4(own + 4 * kMostBlocks, found - wins);
        }
        meet();
        u32 all_wins = 0, all_ties = 0;
#pragma unroll 1
        for (u32 block = 0; block < blocks; ++block) {
          if (block == rank) first = all_wins + least(all_ties, t.ties), taken = t.ties - least(all_ties, t.ties);
          all_wins += ptx::load_shared_4(told + 4 * block);
          all_ties += ptx::load_shared_4(told + 4 * (kMostBlocks + block));
        }
        count = all_wins + least(all_ties, t.ties);
      }
    }
    return count;
  }
};

}  // namespace topk
