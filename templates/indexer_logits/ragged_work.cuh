// Units of ragged calls: neighbouring tokens, each with a window of its own into keys that lie in one piece.
#pragma once
#include "indexer_logits/work.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// Tokens first_token .. + tokens of the call, whose q fits the image together. Its keys are those between the first and the
// last that any of its tokens sees.
struct RaggedUnit {
  static constexpr bool kFills = true;
  int first_token, tokens;

  template <class Params>
  DSA_DEVICE RaggedUnit(const Params& p, u32 unit) {
    first_token = static_cast<int>(unit) * p.unit_tokens;
    tokens = p.tokens - first_token < p.unit_tokens ? p.tokens - first_token : p.unit_tokens;
  }

  template <class Params>
  static DSA_DEVICE u32 units(const Params& p) { return static_cast<u32>(p.unit_count); }

  // Keys that a token sees, none of which the call does not have; of compressed rows no more than they have columns.
  template <class Params>
  static DSA_DEVICE Window limits(const Params& p, i64 token) {
    const i32 start = p.starts[token * p.start_stride], stop = p.ends[token * p.end_stride];
    const u32 begin = start > 0 ? static_cast<u32>(start) : 0;
    u32 end = stop < p.key_count ? (stop > 0 ? static_cast<u32>(stop) : 0) : static_cast<u32>(p.key_count);
    if (begin >= end) return {0, 0};
    if (p.compressed != 0 && end - begin > static_cast<u32>(p.width)) end = begin + static_cast<u32>(p.width);
    return {begin, end};
  }

  // Those that are scored for its i-th token: none where a selection takes all of them unread.
  template <class Params>
  DSA_DEVICE Window window(const Params& p, int i) const {
    const Window seen = limits(p, first_token + i);
    return seen.end - seen.begin <= static_cast<u32>(p.unscored) ? Window{0, 0} : seen;
  }

  // From the first to the last key that any of its tokens needs.
  template <class Params>
  DSA_DEVICE Window around(const Params& p) const {
    Window all{0xffffffffu, 0};
#pragma unroll 4
    for (int i = 0; i < tokens; ++i) {
      const Window own = window(p, i);
      if (own.begin == own.end) continue;
      all.begin = own.begin < all.begin ? own.begin : all.begin;
      all.end = own.end > all.end ? own.end : all.end;
    }
    return all.end == 0 ? Window{0, 0} : all;
  }

  // First of the keys that any of its tokens needs.
  template <class Params>
  DSA_DEVICE u32 first_key(const Params& p) const { return around(p).begin; }

  // How many there are from there on.
  template <class Params>
  DSA_DEVICE u32 keys(const Params& p) const {
    const Window all = around(p);
    return all.end - all.begin;
  }

  template <class Params>
  static DSA_DEVICE u32 origin(const Params& p, const Window& window) { return p.compressed != 0 ? window.begin : 0; }

  template <class Params>
  static DSA_DEVICE u64 rows(const Params& p) { return static_cast<u64>(p.tokens); }
  template <class Params>
  static DSA_DEVICE Window columns(const Params& p, u64 row) {
    const Window seen = limits(p, static_cast<i64>(row));
    const u32 from = origin(p, seen);
    return {seen.begin - from, seen.end - from};
  }

  template <class Params>
  DSA_DEVICE i64 query_byte(const Params& p, int i, int head) const {
    return (first_token + i) * p.q_stride_t + head * p.q_stride_h;
  }
  template <class Params>
  DSA_DEVICE i64 query_scale(const Params& p, int i) const { return (first_token + i) * p.q_scale_stride_t; }

  template <class Params>
  DSA_DEVICE i64 row(const Params&, int i) const { return static_cast<i64>(first_token) + i; }
};

}  // namespace indexer_logits
