// The scores of one row: a window of it, or a part of the window, read 16 B at a time wherever it starts.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/types.cuh"
#include "topk/bounded.cuh"
#include "topk/score.cuh"

namespace topk {

// 16 B of scores; bit e of `live` says that element e lies in the window.
template <class Score>
struct ScoreVector {
  static constexpr int kElements = 4 * Score::kPerWord;
  static constexpr u32 kAllLive = (1u << kElements) - 1;
  u32 words[4];
  u32 live;

  DSA_DEVICE u32 bits(int e) const { return Score::bits(words[e / Score::kPerWord], e % Score::kPerWord); }
};

template <class ScoreType>
struct ScoreRow {
  using Score = ScoreType;
  using Word = typename Score::Word;
  using Vector = ScoreVector<Score>;
  static constexpr u32 kElements = Vector::kElements;

  const Word* base;  // 16-byte boundary at or before the window
  u32 origin;        // where the window starts, counted from base
  u32 first, end;    // what of it is read
  u32 floor;         // keys below are never selected

  template <class Params>
  DSA_DEVICE ScoreRow(const Params& p, u32 row) {
    const int start = p.starts == nullptr ? 0 : bounded(p.starts[row], p.width);
    const int length = bounded(p.lengths == nullptr ? p.width : p.lengths[row], p.width - start);
    const u64 address = reinterpret_cast<u64>(static_cast<const Word*>(p.scores) + static_cast<i64>(row) * p.row_stride + start);
    base = reinterpret_cast<const Word*>(address & ~static_cast<u64>(15));
    origin = first = static_cast<u32>(address % 16) / sizeof(Word);
    end = first + static_cast<u32>(length);
    floor = p.drops_neg_inf != 0 ? (kKeyOfNegInf >> (32 - Score::kKeyBits)) + 1 : 0;
  }

  // Part `part` of `parts`, each of whole vectors but for the window's ends.
  DSA_DEVICE ScoreRow part_of(u32 part, u32 parts) const {
    const u32 each = (vectors() + parts - 1) / parts * kElements;
    ScoreRow out = *this;
    out.first = most(first, least(part * each, end));
    out.end = most(out.first, least((part + 1) * each, end));
    return out;
  }

  DSA_DEVICE u32 length() const { return end - first; }
  DSA_DEVICE u32 first_vector() const { return first / kElements; }
  DSA_DEVICE u32 vectors() const { return (end + kElements - 1) / kElements; }
  // A window that is taken whole is not read, unless scores may be dropped.
  DSA_DEVICE bool taken_unread(u32 k) const { return length() == 0 || (length() <= k && floor == 0); }
  DSA_DEVICE bool whole(u32 n) const { return n * kElements >= first && (n + 1) * kElements <= end; }
  DSA_DEVICE const Word* vector_address(u32 n) const { return base + n * kElements; }
  // Index in the window of a vector's element.
  DSA_DEVICE u32 index(u32 n, u32 e) const { return n * kElements + e - origin; }

  // Vector `n`, all of which lies in the window.
  DSA_DEVICE Vector load_whole(u32 n) const { return vector_of(ptx::load_global_16(vector_address(n))); }

  // Vector `n`, which may lie outside, and of it what does not. Nothing outside of the window is read.
  DSA_DEVICE Vector load(u32 n) const {
    if (whole(n)) return load_whole(n);
    const u32 at = n * kElements;
    Vector v{{0, 0, 0, 0}, 0};
    if (at >= end) return v;
#pragma unroll
    for (u32 e = 0; e < kElements; ++e) {
      if (at + e < first || at + e >= end) continue;
      const u32 bits = base[at + e];
      v.words[e * sizeof(Word) / 4] |= bits << (e * sizeof(Word) % 4 * 8);
      v.live |= 1u << e;
    }
    return v;
  }

  // Vector `n` to where it belongs at shared address `words`, zeros in place of what lies outside.
  DSA_DEVICE void store(u32 n, u32 words) const {
    const Vector v = load(n);
    ptx::store_shared_16(words + 16 * n, {v.words[0], v.words[1], v.words[2], v.words[3]});
  }

  // The element with an index, as fp32 bits.
  DSA_DEVICE u32 bits_at(u32 index) const { return static_cast<u32>(base[origin + index]) << (32 - Score::kKeyBits); }

  // Until a sweep's batch of vectors, or all of them, can be read by the threads that read them.
  DSA_DEVICE void await(u32) const {}
  DSA_DEVICE void await_all() const {}

 protected:
  static DSA_DEVICE Vector vector_of(const Words4& w) { return {{w.x, w.y, w.z, w.w}, Vector::kAllLive}; }
  static DSA_DEVICE int bounded(int value, int limit) { return most(0, least(value, limit)); }
};

}  // namespace topk
