// Exact top-k of a few long rows, each by several blocks in two launches. No block ever waits for another.
//
//   SplitCount    a part of the row each: histogram of the keys' first digit, added to the row's in global memory
//   SplitSelect   every block finds the digit of the k-th largest key from that histogram, and lists the elements of its part
//                 that are or may be selected; the block that finishes last selects from the row's list
//
// If the list has no room for what may be selected, a block selects the k best of its own part instead, and the last one
// selects among those: they have the row's k best in them, in the order of the row.
//
// The workspace is zeros before and after a call: the last block clears what the row has used.
//
// Barrier 0, all threads: the histogram is read; the part is listed; the place in the row's list is known; the part is
// written (then one thread tells the others whether theirs was the last); a list is read.
#pragma once
#include "prims/ptx/block.cuh"
#include "prims/ptx/global_atomic.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "topk/element_list.cuh"
#include "topk/output.cuh"
#include "topk/row.cuh"
#include "topk/row_select.cuh"
#include "topk/row_sweeps.cuh"
#include "topk/score.cuh"
#include "topk/threshold.cuh"

namespace topk {

// A word that is a key already.
template <int kBits>
struct RawKey {
  using Word = u32;
  static constexpr int kKeyBits = kBits, kPerWord = 1;
  static constexpr bool kIsNumber = false;
  static constexpr u32 kLowestWord = 0;
  static DSA_DEVICE u32 bits(u32 word, int) { return word; }
  static DSA_DEVICE u32 key(u32 bits) { return bits; }
  static DSA_DEVICE u32 unshifted(u32 bits) { return bits; }
};

// A row of elements of another, by a list of their indices in ascending order; negative ones are no elements.
template <class Of>
struct GatheredRow {
  using Score = RawKey<Of::Score::kKeyBits>;
  using Vector = ScoreVector<Score>;

  const Of& of;
  const i32* indices;  // 16-byte boundary
  u32 count;           // a multiple of 4
  u32 floor;

  DSA_DEVICE GatheredRow(const Of& row, const i32* list, u32 size)
      : of(row), indices(list), count(size), floor(row.floor == 0 ? 1 : row.floor) {}

  DSA_DEVICE u32 length() const { return count; }
  DSA_DEVICE u32 first_vector() const { return 0; }
  DSA_DEVICE u32 vectors() const { return count / 4; }
  DSA_DEVICE bool whole(u32 n) const { return n < vectors(); }
  DSA_DEVICE u32 index(u32 n, u32 e) const { return n * 4 + e; }
  DSA_DEVICE u32 bits_at(u32 place) const { return key_of(static_cast<u32>(indices[place])); }
  DSA_DEVICE Vector load_whole(u32 n) const {
    const Words4 w = ptx::load_global_16(indices + 4 * n);
    return {{key_of(w.x), key_of(w.y), key_of(w.z), key_of(w.w)}, Vector::kAllLive};
  }
  DSA_DEVICE Vector load(u32 n) const { return whole(n) ? load_whole(n) : Vector{{0, 0, 0, 0}, 0}; }
  DSA_DEVICE void await(u32) const {}
  DSA_DEVICE void await_all() const {}

 private:
  DSA_DEVICE u32 key_of(u32 index) const { return static_cast<i32>(index) < 0 ? 0 : Of::Score::key(of.bits_at(index)); }
};

// Indices to a list, those of a part as they are in the row.
struct ListOutput {
  i32* list;
  bool ordered;
  u32 first;  // index of the part's first element
  DSA_DEVICE void put(u32 slot, u32 index) const { list[slot] = translate(index); }
  DSA_DEVICE i32 translate(u32 index) const { return static_cast<i32>(first + index); }
  DSA_DEVICE void store(u32 slot, u32, i32 id) const { list[slot] = id; }
};

// Places of a list to what its indices become.
template <class Output>
struct GatheredOutput {
  const Output& output;
  const i32* indices;
  bool ordered;
  DSA_DEVICE void put(u32 slot, u32 place) const { output.put(slot, static_cast<u32>(indices[place])); }
  DSA_DEVICE i32 translate(u32 place) const { return output.translate(static_cast<u32>(indices[place])); }
  DSA_DEVICE void store(u32 slot, u32 place, i32 id) const { output.store(slot, static_cast<u32>(indices[place]), id); }
};

template <class C, class S, class Score, class Params>
struct SplitCount {
  using Row = ScoreRow<Score>;
  using Vector = typename Row::Vector;
  static constexpr int kThreads = C::kThreads, kDigitBits = C::kDigitBits, kKeyBits = Score::kKeyBits, kBins = 1 << kDigitBits;

  static DSA_DEVICE void run(const Params& p, S& shared) {
    const u32 parts = static_cast<u32>(p.parts), row = ptx::block_index() / parts;
    const Row scores(p, row);
    if (scores.length() <= static_cast<u32>(p.k)) return;
    const Row part = scores.part_of(ptx::block_index() % parts, parts);
    const typename RowSweeps<C, Row>::Digits digits(shared);
    digits.clear();
    ptx::block_sync();
    RowSweeps<C, Row>{part, digits}.count_first();
    ptx::block_sync();
    u32* histogram = p.histograms + static_cast<i64>(row) * kBins;
    for (int bin = ptx::thread_index(); bin < kBins; bin += kThreads) {
      const u32 count = digits.counted(static_cast<u32>(bin), RowSweeps<C, Row>::kRotated);
      if (count != 0) ptx::global_add(histogram + bin, count);
    }
  }
};

template <class C, class S, class Score, class Params>
struct SplitSelect {
  using Row = ScoreRow<Score>;
  using Vector = typename Row::Vector;
  using Sweeps = RowSweeps<C, Row>;
  static constexpr int kThreads = C::kThreads, kDigitBits = C::kDigitBits, kKeyBits = Score::kKeyBits, kBins = 1 << kDigitBits;
  using List = ElementList<C, S, kThreads, kDigitBits>;

  const Params& p;
  S& shared;
  const u32 thread, parts, row, part, k;
  const Row scores;
  const RowOutput<Params> output;
  u32* const histogram;
  u32* const counters;  // elements in the row's list, blocks that have finished
  i32* const row_list;

  DSA_DEVICE SplitSelect(const Params& params, S& storage)
      : p(params), shared(storage), thread(static_cast<u32>(ptx::thread_index())), parts(static_cast<u32>(params.parts)),
        row(ptx::block_index() / parts), part(ptx::block_index() % parts), k(static_cast<u32>(params.k)), scores(params, row),
        output(params, row), histogram(params.histograms + static_cast<i64>(row) * kBins),
        counters(params.counters + 2 * static_cast<i64>(row)), row_list(params.lists + static_cast<i64>(row) * params.list_stride) {}

  static DSA_DEVICE void run(const Params& p, S& shared) {
    ptx::grid_dependency_wait();
    SplitSelect(p, shared).select();
  }

 private:
  DSA_DEVICE void select() const {
    if (scores.taken_unread(k)) {
      if (part != 0) return;
      for (u32 i = thread; i < scores.length(); i += kThreads) output.put(i, i);
      output.finish(row, scores.length(), thread, kThreads);
      return;
    }
    const typename Sweeps::Digits digits(shared);
    const List list(shared, digits);
    list.clear();
    digits.clear();
    ptx::block_sync();
    for (int bin = static_cast<int>(thread); bin < kBins; bin += kThreads) ptx::store_shared_4(digits.histogram + 4 * bin, histogram[bin]);
    ptx::block_sync();
    // With room for all, everything from the floor on is selected.
    const u32 length = scores.length();
    const Threshold t = length <= k ? Threshold{0, 0, k, length} : digits.next({0, kKeyBits, k, length}, kDigitBits);
    const bool room = Sweeps::can_list(t, k, scores.floor, List::kRoom);
    const Row own = scores.part_of(part, parts);
    room ? list_part(own, t, digits, list) : select_part(own);
    if (!is_last(list)) return;
    const u32 count = room ? select_listed(t, list) : select_gathered();
    output.finish(row, count, thread, kThreads);
    for (int bin = static_cast<int>(thread); bin < kBins; bin += kThreads) histogram[bin] = 0;
    if (thread < 2) counters[thread] = 0;
  }

  DSA_DEVICE void list_part(const Row& own, const Threshold& t, const typename Sweeps::Digits& digits, const List& list) const {
    Sweeps{own, digits}.collect(Bounds(t, scores.floor).lowest(), list);
    ptx::block_sync();
    const u32 count = list.size();
    if (thread == 0) list.set_note(0, ptx::global_fetch_add(counters, count));
    ptx::block_sync();
    const u32 begin = list.note(0);
    for (u32 i = thread; i < count; i += kThreads) row_list[begin + i] = static_cast<i32>(list.index(i));
  }

  // The k best of this part, in order, then -1.
  DSA_DEVICE void select_part(const Row& own) const {
    // Counted from the part's start: a selection looks for indices up to the length of what it selects from.
    Row from_start = own;
    from_start.origin = own.first;
    const u32 slots = static_cast<u32>(p.part_slots), length = own.length();
    const ListOutput best{row_list + static_cast<i64>(part) * slots, true, own.first - own.origin};
    u32 count = length;
    ptx::block_sync();
    if (own.taken_unread(k)) {
      for (u32 i = thread; i < length; i += kThreads) best.put(i, i);
    } else {
      count = select_row<C>(from_start, k, best, shared, [] {});
    }
    for (u32 i = count + thread; i < slots; i += kThreads) best.list[i] = -1;
  }

  // Whether this block is the row's last to come here; then what the others have written is visible.
  DSA_DEVICE bool is_last(const List& list) const {
    ptx::block_sync();
    if (thread == 0) {
      ptx::fence_device();
      list.set_note(1, ptx::global_fetch_add(counters + 1, 1));
      ptx::fence_device();
    }
    ptx::block_sync();
    return list.note(1) == parts - 1;
  }

  DSA_DEVICE u32 select_listed(const Threshold& t, const List& list) const {
    const u32 count = counters[0];
    for (u32 i = thread; i < count; i += kThreads) list.set(i, static_cast<u32>(row_list[i]));
    if (thread == 0) list.set_size(count);
    ptx::block_sync();
    return list.select(t, false, k, scores, output, [] {});
  }

  DSA_DEVICE u32 select_gathered() const {
    const GatheredRow<Row> best(scores, row_list, parts * static_cast<u32>(p.part_slots));
    return select_row<C>(best, k, GatheredOutput<RowOutput<Params>>{output, row_list, output.ordered}, shared, [] {});
  }
};

}  // namespace topk
