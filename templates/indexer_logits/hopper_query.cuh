// What a unit's products need beside keys, in shared memory: q, swizzled for the tensor cores, its weights, and how many keys
// each token sees.
#pragma once
#include "indexer_logits/work.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/opaque.cuh"
#include "prims/ptx/prefetch.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/rows.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// Where members of the block's shared memory lie: one register, from which all of them are a constant away.
template <class S>
struct PlaceOf {
  u32 base;

  DSA_DEVICE explicit PlaceOf(const S& shared) : base(ptx::opaque(ptx::shared_address(&shared))) {}

  // q of a unit's tokens, and the rings of keys behind it.
  DSA_DEVICE u32 operands() const { return base + __builtin_offsetof(S, operands); }
  DSA_DEVICE u32 scales() const { return base + __builtin_offsetof(S, scales); }
  DSA_DEVICE u32 held() const { return base + __builtin_offsetof(S, held); }
  DSA_DEVICE u32 landed() const { return base + __builtin_offsetof(S, landed); }
  DSA_DEVICE u32 weights() const { return base + __builtin_offsetof(S, weights); }
  DSA_DEVICE u32 limits() const { return base + __builtin_offsetof(S, limits); }
};

// Of each request one block starts length and table on their way to L2, and another one q and weights, before any block reads
// them: tables are read when lengths are known, and both would come from memory, one after the other. These are hints, so that
// they may go ahead of the grid before: what it still writes is seen all the same.
template <class C, class Params>
DSA_DEVICE void prefetch_requests(const Params& p) {
  constexpr u32 kLineBytes = 128;
  const u32 batch = static_cast<u32>(p.batch), block = static_cast<u32>(ptx::block_index()), other = p.blocks - 1 - block;
  const u32 thread = static_cast<u32>(ptx::thread_index()), threads = 32 * C::kWarps;
  if (block < batch) {
    const tile::PageDivisor divisor{p.page_multiplier, p.page_shift, p.page_size};
    const i32* table = p.block_table + block * p.table_stride;
    const u32 most = static_cast<u32>(p.most_keys), entries = most == 0 ? 0 : divisor.divide(most - 1) + 1;
    if (thread == 0) ptx::prefetch_l2(p.lens + block * p.lens_stride_b);
    for (u32 i = thread * (kLineBytes / 4); i < entries; i += threads * (kLineBytes / 4)) ptx::prefetch_l2(table + i);
  }
  if (other < batch) {
    for (u32 i = thread; i < p.next_n * static_cast<u32>(C::kHeads); i += threads) {
      const u32 token = i / C::kHeads, head = i % C::kHeads;
      ptx::prefetch_l2(p.q + other * p.q_stride_b + token * p.q_stride_n + head * p.q_stride_h);
      if (head % (kLineBytes / 4) == 0)
        ptx::prefetch_l2(p.weights + (static_cast<i64>(other) * p.next_n + token) * p.weight_stride + head);
    }
  }
}

// Brings a unit's image in two steps, so that what each thread needs first of it, and all of one token, comes while keys are
// asked for.
template <class C, class S, class Operands, class Params>
struct OperandImage {
  static constexpr int kChunks = C::kRowBytes / 16, kThreads = 32 * C::kWarps;
  static constexpr int kAsked = 4;  // chunks of 16 B

  DSA_DEVICE void ask(const Params& p, const Unit& unit) {
    const int thread = ptx::thread_index();
#pragma unroll
    for (int i = 0; i < kAsked; ++i) chunks[i] = chunk(p, unit, thread + i * kThreads);
    weight = weight_of(p, unit, thread);
    limit = thread < unit.tokens ? unit.scored(p, unit.first_token + thread) : 0;
  }

  // All threads of the block come here; a barrier follows. Rows and weights behind a token's heads are zeros.
  DSA_DEVICE void store(const Params& p, const PlaceOf<S>& place, const Unit& unit) const {
    const int thread = ptx::thread_index();
#pragma unroll
    for (int i = 0; i < kAsked; ++i) store_chunk(place, unit, thread + i * kThreads, chunks[i]);
    store_weight(place, unit, thread, weight);
    if (thread < unit.tokens) ptx::store_shared_4(place.limits() + 4 * thread, limit);
#pragma unroll 4
    for (int i = thread + kAsked * kThreads; i < unit.tokens * C::kRows * kChunks; i += kThreads)
      store_chunk(place, unit, i, chunk(p, unit, i));
    for (int i = thread + kThreads; i < unit.tokens * C::kWeightWords; i += kThreads)
      store_weight(place, unit, i, weight_of(p, unit, i));
  }

 private:
  // 16 B of a row of q, and the scales of its blocks.
  struct Chunk {
    Words4 codes;
    u32 scales;
  };
  Chunk chunks[kAsked];
  u32 weight, limit;

  static DSA_DEVICE Chunk chunk(const Params& p, const Unit& unit, int i) {
    const int row = i / kChunks, token = row / C::kRows, head = row - token * C::kRows;
    if (token >= unit.tokens || head >= C::kHeads) return {{0, 0, 0, 0}, 0};
    u32 scales = 0;
    if constexpr (Operands::kBlockScales) scales = ptx::load_global_4(p.q_scales + unit.query_scale(p, token) + head);
    return {ptx::load_global_16(p.q + unit.query_byte(p, token, head) + i % kChunks * 16), scales};
  }

  static DSA_DEVICE void store_chunk(const PlaceOf<S>& place, const Unit& unit, int i, const Chunk& chunk) {
    const int row = i / kChunks, token = row / C::kRows, head = row - token * C::kRows;
    if (token >= unit.tokens) return;
    Operands::store_chunk(place.operands() + token * C::kTokenBytes, head, i % kChunks, chunk.codes, chunk.scales);
  }

  static DSA_DEVICE u32 weight_of(const Params& p, const Unit& unit, int i) {
    const int token = i / C::kWeightWords, head = head_of(i - token * C::kWeightWords);
    if (token >= unit.tokens || head >= C::kHeads) return 0;
    return ptx::load_global_4(p.weights + unit.row(p, token) * p.weight_stride + head);
  }

  static DSA_DEVICE void store_weight(const PlaceOf<S>& place, const Unit& unit, int i, u32 value) {
    if (i < unit.tokens * C::kWeightWords) ptx::store_shared_4(place.weights() + 4 * i, value);
  }

  // Weights stand as lanes take them: the four columns of a lane in two tiles of 8 heads adjoin. kHeads or more: none.
  static DSA_DEVICE int head_of(int word) {
    constexpr int kPartRows = C::kRows / C::kParts, kPartWords = C::kWeightWords / C::kParts;
    const int part = word / kPartWords, in_part = word % kPartWords;
    const int column = in_part / 16 * 16 + in_part / 2 % 2 * 8 + in_part / 4 % 4 * 2 + in_part % 2;
    return column < kPartRows ? part * kPartRows + column : C::kHeads;
  }
};

}  // namespace indexer_logits
