// The scores of one row: a window of it, read 16 B at a time wherever it starts.
#pragma once
#include "prims/ptx/memory.cuh"
#include "prims/types.cuh"

namespace topk {

// 16 B of scores; bit e of `live` says that element e lies in the window.
template <class Score>
struct ScoreVector {
  static constexpr int kElements = 16 / sizeof(typename Score::Word);
  u32 words[4];
  u32 live;

  DSA_DEVICE bool holds(int e) const { return (live >> e & 1) != 0; }
  DSA_DEVICE u32 key(int e, bool drops_neg_inf) const {
    constexpr int kInWord = 4 / sizeof(typename Score::Word);
    const u32 word = words[e / kInWord];
    return Score::key(kInWord == 1 ? word : word >> (e % kInWord * 16) & 0xffff, drops_neg_inf);
  }
};

template <class Score>
struct ScoreRow {
  using Word = typename Score::Word;
  using Vector = ScoreVector<Score>;
  static constexpr u32 kElements = Vector::kElements;

  const Word* base;  // 16-byte boundary at or before the window
  u32 first, end;    // the window, counted from base
  bool drops_neg_inf;

  template <class Params>
  DSA_DEVICE ScoreRow(const Params& p, u32 row) {
    const int start = p.starts == nullptr ? 0 : bounded(p.starts[row], p.width);
    const int length = bounded(p.lengths == nullptr ? p.width : p.lengths[row], p.width - start);
    const u64 address = reinterpret_cast<u64>(static_cast<const Word*>(p.scores) + static_cast<i64>(row) * p.row_stride + start);
    base = reinterpret_cast<const Word*>(address & ~static_cast<u64>(15));
    first = static_cast<u32>(address % 16) / sizeof(Word);
    end = first + static_cast<u32>(length);
    drops_neg_inf = p.drops_neg_inf != 0;
  }

  DSA_DEVICE u32 length() const { return end - first; }
  DSA_DEVICE u32 vectors() const { return (end + kElements - 1) / kElements; }
  DSA_DEVICE u32 key(const Vector& v, int e) const { return v.key(e, drops_neg_inf); }

  // Vector `n` from base, which may be past the last. Nothing outside of the window is read.
  DSA_DEVICE Vector load(u32 n) const {
    const u32 at = n * kElements;
    Vector v;
    if (at >= first && at + kElements <= end) {
      const Words4 w = ptx::load_global_16(base + at);
      v.words[0] = w.x, v.words[1] = w.y, v.words[2] = w.z, v.words[3] = w.w;
      v.live = (1u << kElements) - 1;
      return v;
    }
    v.words[0] = v.words[1] = v.words[2] = v.words[3] = v.live = 0;
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

 private:
  static DSA_DEVICE int bounded(int value, int most) { return value < 0 ? 0 : value < most ? value : most; }
};

}  // namespace topk
