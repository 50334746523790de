// What a unit's products need beside keys, in shared memory: q, swizzled for the tensor cores, its weights, and how many keys
// each token sees.
#pragma once
#include "indexer_logits/work.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/opaque.cuh"
#include "prims/ptx/thread.cuh"
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

template <class C, class S, class Operands, class Params>
struct OperandImage {
  static constexpr int kChunks = C::kRowBytes / 16, kThreads = 32 * C::kWarps;

  // All threads of the block come here; a barrier follows. Rows and weights behind a
  // token's heads are zeros.
  static DSA_DEVICE void stage(const Params& p, const PlaceOf<S>& place, const Unit& unit) {
    const int thread = ptx::thread_index();
#pragma unroll 4
    for (int i = thread; i < unit.tokens * C::kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks, token = row / C::kRows, head = row - token * C::kRows;
      const u32 image = place.operands() + token * C::kTokenBytes;
      const u8* q = p.q + unit.query_byte(p, token, head);
      const bool there = C::kRows == C::kHeads || head < C::kHeads;
      u32 scales = 0;
      if constexpr (Operands::kBlockScales)
        if (there) scales = ptx::load_global_4(p.q_scales + unit.query_scale(p, token) + head);
      const Words4 codes = there ? ptx::load_global_16(q + 16 * chunk) : Words4{0, 0, 0, 0};
      Operands::store_chunk(image, head, chunk, codes, scales);
    }
    for (int i = thread; i < unit.tokens * C::kWeightWords; i += kThreads) {
      const int token = i / C::kWeightWords, head = head_of(i - token * C::kWeightWords);
      const float* weights = p.weights + unit.row(p, token) * p.weight_stride;
      ptx::store_shared_4(place.weights() + 4 * i, head < C::kHeads ? ptx::load_global_4(weights + head) : 0);
    }
    if (thread < unit.tokens) ptx::store_shared_4(place.limits() + 4 * thread, unit.scored(p, unit.first_token + thread));
  }

 private:
  // Weights stand as lanes take them: the four columns of a lane in two tiles of 8 heads adjoin. kHeads or more: none.
  static DSA_DEVICE int head_of(int word) {
    constexpr int kPartRows = C::kRows / C::kParts, kPartWords = C::kWeightWords / C::kParts;
    const int part = word / kPartWords, in_part = word % kPartWords;
    const int column = in_part / 16 * 16 + in_part / 2 % 2 * 8 + in_part / 4 % 4 * 2 + in_part % 2;
    return column < kPartRows ? part * kPartRows + column : C::kHeads;
  }
};

}  // namespace indexer_logits
