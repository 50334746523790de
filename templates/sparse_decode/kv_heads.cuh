// Caches of several KV heads: each CTA works for query heads of one of them, over the cache rows of that head alone.
//
// Query head h is of KV head h / (heads / KV heads). The query heads of a KV head are dealt evenly to kv_head_groups CTAs, so
// those of all KV heads in turn are the head groups of a call with one; what differs is where rows and lists begin.
#pragma once
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"

namespace sparse_decode {

template <class C, class Shared, class Body, class Params>
struct OfKvHead {
  static constexpr int kThreads = Body::kThreads;

  static DSA_DEVICE void run(const Params& p, Shared& shared) {
    const i64 head = ptx::block_index() % static_cast<u32>(p.head_groups) / static_cast<u32>(p.kv_head_groups);
    Params own = p;
    own.kv += head * p.head_stride_bytes;
    own.indices += head * p.indices_stride_kv;
    if (p.topk_length != nullptr) own.topk_length += head * p.length_stride_kv;
    // Formats that share a call have second parts alike.
    if constexpr (C::kPartBytes > 0) own.kv_part += head * p.part_head_stride_bytes;
    if constexpr (C::kSources == 2) {
      own.extra_kv += head * p.extra_head_stride_bytes;
      own.extra_indices += head * p.extra_indices_stride_kv;
      if (p.extra_topk_length != nullptr) own.extra_topk_length += head * p.extra_length_stride_kv;
      if constexpr (C::kPartBytes > 0) own.extra_kv_part += head * p.extra_part_head_stride_bytes;
    }
    Body::run(own, shared);
  }
};

}  // namespace sparse_decode
