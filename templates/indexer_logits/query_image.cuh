// q and the weights of a unit in shared memory: a row of f16 for each token and head, in the order in which keys are held.
#pragma once
#include "indexer_logits/work.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// Where 4 dims of a row, word `word` of it, stand in the products: in which step of k 16, and at which k (2 c, 2 c + 1,
// 2 c + 8, 2 c + 9). A lane of column c so finds its dims of a key in pieces of kPieceWords words that adjoin.
template <int kDim>
struct DimOrder {
  static constexpr int kPieceWords = kDim >= 64 ? 4 : kDim / 16;
  static constexpr int kPieces = kDim / (16 * kPieceWords);  // of a lane
  static_assert(kDim % 32 == 0 && kDim == 16 * kPieceWords * kPieces);

  static DSA_DEVICE int step(int word) { return kPieceWords * (word / kPieceWords / 4) + word % kPieceWords; }
  static DSA_DEVICE int column(int word) { return word / kPieceWords % 4; }
};

template <class C, class S, class Keys, class Params>
struct QueryImage {
  static constexpr int kChunks = C::kDim / 16;  // 16 B of codes each
  using Order = DimOrder<C::kDim>;

  // All threads of the block come here; a barrier follows.
  static DSA_DEVICE void stage(const Params& p, S& shared, const Unit& unit) {
    const int thread = ptx::thread_index(), rows = unit.tokens * p.heads;
    const u32 image = ptx::shared_address(&shared.query[0][0]), weights = ptx::shared_address(&shared.weights[0]);
#pragma unroll 4
    for (int i = thread; i < rows * kChunks; i += 32 * C::kWarps) {
      const int row = i / kChunks, chunk = i % kChunks, token = row / p.heads, head = row - token * p.heads;
      const u8* q = p.q + unit.request * p.q_stride_b + (unit.first_token + token) * p.q_stride_n + head * p.q_stride_h;
      store_chunk(image + row * C::kQueryPitchBytes, chunk, ptx::load_global_16(q + 16 * chunk));
    }
    for (int i = thread; i < rows; i += 32 * C::kWarps) {
      const int token = i / p.heads, head = i - token * p.heads;
      ptx::store_shared_4(weights + 4 * i, ptx::load_global_4(p.weights + unit.row(p, token) * p.weight_stride + head));
    }
  }

 private:
  static DSA_DEVICE void store_chunk(u32 row, int chunk, Words4 codes) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 low, high;
      Keys::pairs(words[i], low, high);
      const u32 at = row + 32 * Order::step(4 * chunk + i) + 4 * Order::column(4 * chunk + i);
      ptx::store_shared_4(at, low);
      ptx::store_shared_4(at + 16, high);
    }
  }
};

}  // namespace indexer_logits
