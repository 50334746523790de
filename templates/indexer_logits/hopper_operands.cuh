// What warpgroups multiply: codes as they come, or 16-bit numbers with the scales of their blocks in them. Both say how a
// lane's bytes of a key become its part of A, where q stands in the image that B is read from, and which products follow.
#pragma once
#include "indexer_logits/query_image.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/wgmma.cuh"
#include "prims/ptx/wgmma_e4m3.cuh"
#include "prims/types.cuh"

namespace indexer_logits {

// Where 4 dims of a row, word `word` of it, stand in the products: a lane of column c finds its dims of a key in pieces of
// kPieceWords words that adjoin, and word i of a piece is its half of 4 codes of a step of k 32: the lower of the two where
// i is even.
template <int kDim>
struct CodeOrder {
  static constexpr int kPieceWords = kDim >= 64 ? 4 : kDim / 16;
  static constexpr int kPieces = kDim / (16 * kPieceWords);  // of a lane
  static constexpr int kSteps = kDim / 32;
  static_assert(kDim % 32 == 0 && kPieceWords % 2 == 0 && kDim == 16 * kPieceWords * kPieces);

  // The 16 bytes of a row of the image, and the byte in there.
  static DSA_DEVICE int unit(int word) { return kPieceWords * (word / kPieceWords / 4) + word % kPieceWords; }
  static DSA_DEVICE int byte(int word) { return word / kPieceWords % 4 * 4; }
};

// e4m3 codes, whose key has a scale of its own.
template <class C>
struct CodeOperands {
  static constexpr bool kBlockScales = false;
  static constexpr int kDim = C::kDim, kSteps = kDim / 32, kWords = C::kRowBytes / 16;
  using Order = CodeOrder<kDim>;
  static_assert(C::kRowBytes == kDim);

  // A lane's words of a row, which is row r (half 0) or r + 8 (half 1) of a product.
  static DSA_DEVICE void take(u32 (&a)[kSteps][4], int half, const u32 (&words)[kWords], u32, int) {
#pragma unroll
    for (int n = 0; n < kWords; ++n) a[n / 2][n % 2 * 2 + half] = words[n];
  }

  // 16 bytes of q into a row of the image.
  static DSA_DEVICE void store_chunk(u32 image, int row, int chunk, Words4 codes, u32) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int word = 4 * chunk + i;
      ptx::store_shared_4(ptx::swizzled_address(image, row, Order::unit(word)) + Order::byte(word), words[i]);
    }
  }

  // d = products of all steps, a group of their own.
  template <int kTiles>
  static DSA_DEVICE void start(float (&d)[kTiles][4], const u32 (&a)[kSteps][4], u64 b) {
    ptx::WgmmaE4m3<kTiles>::start(d, a[0], b);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) ptx::WgmmaE4m3<kTiles>::add(d, a[step], b + 2 * step);
    ptx::wgmma_commit();
  }
};

// Operands of the codes of a word: two for each 4 of them, of which A and B have k 2c, 2c + 1 in the first and 2c + 8, 2c + 9 in
// the second. Codes of 4 bits go in pairs of which one is four behind the other, so that a shift brings both in place.
template <class Codes>
DSA_DEVICE void halves_of(u32 word, typename Codes::Factor factor, u32 (&halves)[16 / Codes::kBits]) {
  if constexpr (Codes::kBits == 8) {
    Codes::quad(word, factor, halves[0], halves[1]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) halves[i] = Codes::of_tops(word << (12 - 4 * i), factor);
  }
}

// bf16 of codes with their blocks' scales, a lane's pieces of a row as in the portable body. Rows of q that are longer than
// 128 B continue in the next part of the token's image, which has all its rows, too.
template <class C, class Codes>
struct HalfOperands {
  static constexpr bool kBlockScales = true;
  static constexpr int kDim = C::kDim, kSteps = kDim / 16, kWords = C::kRowBytes / 16, kPartSteps = 4;
  static constexpr int kPartBytes = C::kRows * C::kQueryPitchBytes, kWordQuads = 8 / Codes::kBits;
  using Order = DimOrder<kDim, Codes::kBits>;
  static_assert(4 * kWords == Order::kLaneBytes && Codes::kBlockScales);

  static DSA_DEVICE void take(u32 (&a)[kSteps][4], int half, const u32 (&words)[kWords], u32 scales, int lane) {
#pragma unroll
    for (int piece = 0; piece < Order::kPieces; ++piece) {
      const typename Codes::Factor factor = Codes::factor(scales, (4 * piece + lane % 4) * Order::kPieceQuads / 8);
#pragma unroll
      for (int i = 0; i < Order::kPieceQuads; i += kWordQuads) {
        u32 halves[2 * kWordQuads];
        halves_of<Codes>(words[piece * (Order::kPieceBytes / 4) + i / kWordQuads], factor, halves);
#pragma unroll
        for (int n = 0; n < 2 * kWordQuads; ++n) a[piece * Order::kPieceQuads + i + n / 2][half + n % 2 * 2] = halves[n];
      }
    }
  }

  static DSA_DEVICE void store_chunk(u32 image, int row, int chunk, Words4 codes, u32 scales) {
    constexpr int kChunkQuads = 32 / Codes::kBits;
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    const typename Codes::Factor factor = Codes::factor(scales, chunk * kChunkQuads / 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 halves[2 * kWordQuads];
      halves_of<Codes>(words[i], factor, halves);
#pragma unroll
      for (int n = 0; n < 2 * kWordQuads; ++n) {
        const int quad = kChunkQuads * chunk + kWordQuads * i + n / 2, step = Order::step(quad);
        const u32 part = image + step / kPartSteps * kPartBytes;
        const int unit = step % kPartSteps * 2 + n % 2;
        ptx::store_shared_4(ptx::swizzled_address(part, row, unit) + 4 * Order::column(quad), halves[n]);
      }
    }
  }

  template <int kTiles>
  static DSA_DEVICE void start(float (&d)[kTiles][4], const u32 (&a)[kSteps][4], u64 b) {
    ptx::Wgmma<false, kTiles>::bf16(d, a[0], b);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      ptx::Wgmma<true, kTiles>::bf16(d, a[step], b + step / kPartSteps * (kPartBytes / 16) + step % kPartSteps * 2);
    }
    ptx::wgmma_commit();
  }
};

}  // namespace indexer_logits
