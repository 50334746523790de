// q and the weights of a unit in shared memory: a row of operands for each token and head, in the order in which keys are held.
#pragma once
#include "indexer_logits/work.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// Where 4 dims of a row, quad `quad` of it, stand in the products: in which step of k 16, and at which k (2 c, 2 c + 1,
// 2 c + 8, 2 c + 9). A lane of column c so finds its dims of a key in pieces of kPieceQuads quads that adjoin.
template <int kDim, int kBits>
struct DimOrder {
  static constexpr int kLaneBytes = kDim * kBits / 32;
  static constexpr int kPieceBytes = kLaneBytes < 16 ? kLaneBytes : 16;
  static constexpr int kPieceQuads = 2 * kPieceBytes / kBits;
  static constexpr int kPieces = kLaneBytes / kPieceBytes;  // of a lane
  static_assert(kDim == 16 * kPieceQuads * kPieces && kPieceBytes % 4 == 0);
  static_assert(kPieceQuads <= 8, "a piece has one scale, of 32 dims");

  static DSA_DEVICE int step(int quad) { return kPieceQuads * (quad / kPieceQuads / 4) + quad % kPieceQuads; }
  static DSA_DEVICE int column(int quad) { return quad / kPieceQuads % 4; }

  // Quad `i` of words that hold some.
  static DSA_DEVICE u32 quad_of(const u32* words, int i) { return kBits == 8 ? words[i] : words[i / 2] >> 16 * (i % 2) & 0xffffu; }
};

template <class C, class S, class Codes, class Unit, class Params>
struct QueryImage {
  static constexpr int kChunks = C::kRowBytes / 16, kChunkQuads = 32 / Codes::kBits;
  using Order = DimOrder<C::kDim, Codes::kBits>;

  // All threads of the block come here; a barrier follows.
  static DSA_DEVICE void stage(const Params& p, S& shared, const Unit& unit) {
    const int thread = ptx::thread_index(), rows = unit.tokens * p.heads;
    const u32 image = ptx::shared_address(&shared.query[0][0]), weights = ptx::shared_address(&shared.weights[0]);
#pragma unroll 4
    for (int i = thread; i < rows * kChunks; i += 32 * C::kWarps) {
      const int row = i / kChunks, chunk = i % kChunks, token = row / p.heads, head = row - token * p.heads;
      u32 scales = 0;
      if constexpr (Codes::kBlockScales) scales = ptx::load_global_4(p.q_scales + unit.query_scale(p, token) + head);
      const Words4 codes = ptx::load_global_16(p.q + unit.query_byte(p, token, head) + 16 * chunk);
      store_chunk(image + row * C::kQueryPitchBytes, chunk, codes, scales);
    }
    for (int i = thread; i < rows; i += 32 * C::kWarps) {
      const int token = i / p.heads, head = i - token * p.heads;
      ptx::store_shared_4(weights + 4 * i, ptx::load_global_4(p.weights + unit.row(p, token) * p.weight_stride + head));
    }
  }

 private:
  static DSA_DEVICE void store_chunk(u32 row, int chunk, Words4 codes, u32 scales) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    const typename Codes::Factor factor = Codes::factor(scales, chunk * kChunkQuads / 8);
#pragma unroll
    for (int i = 0; i < kChunkQuads; ++i) {
      const int quad = kChunkQuads * chunk + i;
      u32 low, high;
      Codes::quad(Order::quad_of(words, i), factor, low, high);
      const u32 at = row + 32 * Order::step(quad) + 4 * Order::column(quad);
      ptx::store_shared_4(at, low);
      ptx::store_shared_4(at + 16, high);
    }
  }
};

}  // namespace indexer_logits
