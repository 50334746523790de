// The caches that a call attends to: one, or a second one in the same softmax, each with lists, pages and rows of its own.
#pragma once
#include "prims/tile/rows.cuh"
#include "prims/types.cuh"

namespace sparse_decode {

// Constants of the second cache's rows under the names that encodings and copies read, where its format is another one.
template <class C>
struct ExtraRow : C {
  static constexpr int kNopeDims = C::kExtraNopeDims;
  static constexpr int kRopeDims = C::kExtraRopeDims;
  static constexpr int kRopeOffsetBytes = C::kExtraRopeOffsetBytes;
  static constexpr int kRowBytes = C::kExtraRowBytes;
  static constexpr int kPartBytes = C::kExtraPartBytes;
  static constexpr int kPartOffsetBytes = C::kExtraPartOffsetBytes;
  static constexpr int kRowPitchBytes = C::kExtraRowPitchBytes;
  static constexpr int kScaleGroupDims = C::kExtraScaleGroupDims;
  static constexpr int kScaleOffsetBytes = C::kExtraScaleOffsetBytes;
};

template <class A, class B>
constexpr bool kSameType = false;
template <class A>
constexpr bool kSameType<A, A> = true;

// Arguments of a cache by which one it is.
template <bool kExtra>
struct Source {
  template <class Params>
  static DSA_DEVICE tile::RowPool pool(const Params& p) {
    if constexpr (kExtra) {
      return {p.extra_kv, p.extra_page_stride_bytes, p.extra_row_stride_bytes, p.extra_pool_tokens,
              {p.extra_page_multiplier, p.extra_page_shift, p.extra_page_size}};
    } else {
      return {p.kv, p.page_stride_bytes, p.row_stride_bytes, p.pool_tokens, {p.page_multiplier, p.page_shift, p.page_size}};
    }
  }

  // Where the second parts of rows lie.
  template <class Params>
  static DSA_DEVICE tile::RowPool part_pool(const Params& p) {
    if constexpr (kExtra) {
      return {p.extra_kv_part, p.extra_part_page_stride_bytes, p.extra_part_row_stride_bytes, p.extra_pool_tokens,
              {p.extra_page_multiplier, p.extra_page_shift, p.extra_page_size}};
    } else {
      return {p.kv_part, p.part_page_stride_bytes, p.part_row_stride_bytes, p.pool_tokens,
              {p.page_multiplier, p.page_shift, p.page_size}};
    }
  }

  // The index row of a query token.
  template <class Params>
  static DSA_DEVICE const i32* indices(const Params& p, i64 batch, i64 token) {
    if constexpr (kExtra) {
      return p.extra_indices + batch * p.extra_indices_stride_b + token * p.extra_indices_stride_s;
    } else {
      return p.indices + batch * p.indices_stride_b + token * p.indices_stride_s;
    }
  }

  // Its live columns.
  template <class Params>
  static DSA_DEVICE int length(const Params& p, i64 batch, i64 token) {
    if constexpr (kExtra) {
      return bounded(p.extra_topk, p.extra_topk_length, batch * p.extra_length_stride_b + token * p.extra_length_stride_s);
    } else {
      return bounded(p.topk, p.topk_length, batch * p.length_stride_b + token * p.length_stride_s);
    }
  }

 private:
  static DSA_DEVICE int bounded(int width, const i32* lengths, i64 at) {
    if (lengths == nullptr) return width;
    const int given = lengths[at];
    return given < 0 ? 0 : given < width ? given : width;
  }
};

}  // namespace sparse_decode
