// The warps that sum values: O^T += V^T P^T, each for its own dims.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/mma.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Shared, class Encoding, class Params>
struct ValueWarp {
  static constexpr int kTileStages = C::kTileTokens / C::kStageTokens;
  static constexpr int kStageBlocks = C::kStageTokens / 16;
  static constexpr int kHeadTiles = C::kHeads / 8;
  static constexpr int kDims = C::kValueDims / C::kValueWarps;
  static constexpr int kBlocks = kDims / 16;
  static constexpr int kCopyDims = C::kValueDims / Encoding::kProbabilityCopies;
  static_assert(kDims % 32 == 0 && kCopyDims % kDims == 0, "a warp's dims share one probability copy");

  const Params& p;
  Shared& shared;
  const Work<C, Params>& work;
  const int warp, lane;
  float output[kBlocks][kHeadTiles][4];

  DSA_DEVICE ValueWarp(const Params& params, Shared& storage, const Work<C, Params>& item, int warp_, int lane_)
      : p(params), shared(storage), work(item), warp(warp_), lane(lane_), output{} {}

  DSA_DEVICE void run() {
    int slot = 0, buffer = 0;
    u32 parity = 0, round = 0;
#pragma unroll 1
    for (int i = 0; i < work.tiles; ++i) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.filled[buffer]), round & 1);
      if (shared.raised[buffer]) scale_output(shared.shrink[buffer]);
      accumulate(slot, parity, buffer);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.drained[buffer]));
      if (++buffer == C::kProbabilityBuffers) buffer = 0, ++round;
    }
  }

  DSA_DEVICE void write() {
    ptx::mbarrier_wait(ptx::shared_address(&shared.finished[0]), 0);  // the output factors are in head_value
    if (work.tiles == 0 && p.num_splits > 1) return;  // the combine gives an empty split no weight and does not read it
    scale_output(shared.head_value);
    if (p.num_splits > 1) {
      float* target = p.o_accum + (work.partial_row(p) * p.heads + work.first_head) * C::kValueDims;
      write_heads(target, static_cast<i64>(C::kValueDims), [](float* at, float a, float b) {
        *reinterpret_cast<u64*>(at) = static_cast<u64>(ptx::bits_of(b)) << 32 | ptx::bits_of(a);
      });
    } else {
      u16* target = p.out + work.batch(p) * p.out_stride_b + work.token(p) * p.out_stride_s + work.first_head * p.out_stride_h;
      write_heads(target, p.out_stride_h, [](u16* at, float a, float b) { *reinterpret_cast<u32*>(at) = ptx::pack_bf16(a, b); });
    }
  }

 private:
  // Stage by stage; frees each stage behind itself and advances the ring.
  DSA_DEVICE void accumulate(int& slot, u32& parity, int buffer) {
    const u32 copy = ptx::shared_address(shared.probability[buffer]) + warp * kDims / kCopyDims * kProbabilityBytes<C>;
#pragma unroll 1
    for (int stage = 0; stage < kTileStages; ++stage) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.landed[slot]), parity);
      const u32 rows = ptx::shared_address(&shared.rows[slot][0][0]), valid = shared.valid[slot];
#pragma unroll
      for (int k = 0; k < kStageBlocks; ++k)
        if ((valid >> 16 * k & 0xffffu) != 0)
          accumulate_block(rows + k * 16 * C::kRowPitchBytes, probability_address<C>(copy, (stage * kStageBlocks + k) * 16 + lane % 16));
      ptx::mbarrier_arrive(ptx::shared_address(&shared.freed[slot]));
      advance_ring<C::kStages>(slot, parity, 1);
    }
  }

  // 16 tokens; `row` is this lane's row of P.
  DSA_DEVICE void accumulate_block(u32 rows, u32 row) {
    u32 b[kHeadTiles][2];
#pragma unroll
    for (int t = 0; t + 1 < kHeadTiles; t += 2) {
      const Words4 w = ptx::load_matrix_x4_trans(row + probability_chunk<C>(t + lane / 16, lane % 8));
      b[t][0] = w.x, b[t][1] = w.y, b[t + 1][0] = w.z, b[t + 1][1] = w.w;
    }
    if constexpr (kHeadTiles % 2 != 0) {
      constexpr int t = kHeadTiles - 1;
      ptx::load_matrix_x2_trans(b[t][0], b[t][1], row + probability_chunk<C>(t, lane % 8));
    }
#pragma unroll
    for (int block = 0; block < kBlocks; block += Encoding::kBlocksPerLoad) {
      u32 a[Encoding::kBlocksPerLoad][4];
      Encoding::value_blocks(a, rows, warp * kDims + block * 16, lane);
#pragma unroll
      for (int i = 0; i < Encoding::kBlocksPerLoad; ++i)
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t)
          ptx::mma_bf16(output[block + i][t], a[i][0], a[i][1], a[i][2], a[i][3], b[t][0], b[t][1]);
    }
  }

  // `factors`: one per head, in shared memory.
  template <class Factors>
  DSA_DEVICE void scale_output(const Factors& factors) {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = factors[8 * t + 2 * (lane % 4) + e];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) output[block][t][e] *= factor, output[block][t][e + 2] *= factor;
      }
  }

  // Each lane writes pairs of neighbouring dims. `target` is the first head's row.
  template <class Element, class Store>
  DSA_DEVICE void write_heads(Element* target, i64 head_stride, Store store) {
    // Block rows r = lane / 4 and r + 8 are dims 2 r, 2 r + 1 of the block, or dims r, r + 8: then lanes with even r take
    // dims r, r + 1 and those with odd r dims r + 7, r + 8, after one exchange with lane ^ 4.
    const bool odd = lane / 4 % 2;
    const int pair = Encoding::kRowsAreNeighbours ? 2 * (lane / 4) : lane / 4 + (odd ? 7 : 0);
    target += warp * kDims + pair;
    const int heads = work.heads(p);
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int h = 8 * t + 2 * (lane % 4) + e;
        Element* at = target + h * head_stride;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          float a = output[block][t][e], b = output[block][t][e + 2];
          if constexpr (!Encoding::kRowsAreNeighbours) {
            const float received = ptx::float_of(ptx::shuffle_xor(ptx::bits_of(odd ? a : b), 4));
            if (odd) a = received;
            else b = received;
          }
          if (h < heads) store(at + block * 16, a, b);
        }
      }
  }
};

}  // namespace sparse_decode
