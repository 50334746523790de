// The warps that sum values: O^T += V^T P^T, each for its own dims.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/packed.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Shared, class Encoding, class ExtraEncoding, class Params>
struct ValueWarp {
  static constexpr int kTileStages = C::kTileTokens / C::kStageTokens;
  static constexpr int kStageBlocks = C::kStageTokens / 16;
  static constexpr int kHeadTiles = C::kHeads / 8;
  static constexpr int kDims = C::kValueDims / C::kValueWarps;
  static constexpr int kBlocks = kDims / 16;
  static constexpr int kPlainDims = Encoding::kPlainValueDims;
  template <class E>
  static constexpr int kCopyDims = C::kValueDims / E::kProbabilityCopies;
  static_assert(kDims % 32 == 0 && kCopyDims<Encoding> % kDims == 0 && kCopyDims<ExtraEncoding> % kDims == 0,
                "a warp's dims share one probability copy");
  static_assert(kPlainDims % kDims == 0 && kPlainDims == ExtraEncoding::kPlainValueDims);

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
    if constexpr (kSameType<Encoding, ExtraEncoding>) {
      run<Encoding>(slot, parity, buffer, round, 0, work.tiles);
    } else {
      run<Encoding>(slot, parity, buffer, round, 0, work.main_tiles);
      reorder_output();
      run<ExtraEncoding>(slot, parity, buffer, round, work.main_tiles, work.tiles);
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
  // Whether this warp's dims are plain bf16 beside quantised ones.
  DSA_DEVICE bool is_plain() const { return kPlainDims > 0 && warp * kDims >= C::kValueDims - kPlainDims; }

  // Tiles begin .. end - 1 of this split, all of one encoding.
  template <class E>
  DSA_DEVICE void run(int& slot, u32& parity, int& buffer, u32& round, int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.filled[buffer]), round & 1);
      if (shared.raised[buffer]) scale_output(shared.shrink[buffer]);
      accumulate<E>(slot, parity, buffer);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.drained[buffer]));
      if (++buffer == C::kProbabilityBuffers) buffer = 0, ++round;
    }
  }

  // Stage by stage; frees each stage behind itself and advances the ring.
  template <class E>
  DSA_DEVICE void accumulate(int& slot, u32& parity, int buffer) {
    const u32 copy = ptx::shared_address(shared.probability[buffer]) + warp * kDims / kCopyDims<E> * kProbabilityBytes<C>;
#pragma unroll 1
    for (int stage = 0; stage < kTileStages; ++stage) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.landed[slot]), parity);
      const u32 rows = ptx::shared_address(&shared.rows[slot][0][0]), valid = shared.valid[slot];
      if constexpr (kPlainDims > 0) {
        if (is_plain())
          accumulate_stage<E, typename E::template PlainValues<kDims, kHeadTiles>>(rows, valid, copy, stage);
        else
          accumulate_stage<E, typename E::template Values<kDims, kHeadTiles>>(rows, valid, copy, stage);
      } else {
        accumulate_stage<E, typename E::template Values<kDims, kHeadTiles>>(rows, valid, copy, stage);
      }
      ptx::mbarrier_arrive(ptx::shared_address(&shared.freed[slot]));
      advance_ring<C::kStages>(slot, parity, 1);
    }
  }

  template <class E, class Values>
  DSA_DEVICE void accumulate_stage(u32 rows, u32 valid, u32 copy, int stage) {
    if constexpr (E::kJoinsBlocks) {
      // Without branches between them the loads of one block hide behind the arithmetic of the other.
      static_assert(kStageBlocks == 2);
      if ((valid & 0xffffu) != 0 && valid >> 16 != 0) {
#pragma unroll
        for (int k = 0; k < kStageBlocks; ++k) accumulate_block<E, Values>(rows, copy, stage, k);
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kStageBlocks; ++k)
      if ((valid >> 16 * k & 0xffffu) != 0) accumulate_block<E, Values>(rows, copy, stage, k);
  }

  // The k-th 16 tokens of a stage.
  template <class E, class Values>
  DSA_DEVICE void accumulate_block(u32 stage_rows, u32 copy, int stage, int k) {
    const u32 rows = stage_rows + k * 16 * E::Row::kRowPitchBytes;
    const u32 row = probability_address<C>(copy, (stage * kStageBlocks + k) * 16 + lane % 16);  // this lane's row of P
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
    const Values values(rows, warp * kDims, lane);
    if constexpr (Values::kScaledBlocks >= kBlocks) scale_probabilities(b, b, values, 0);
#pragma unroll
    for (int block = 0; block < kBlocks; block += E::kBlocksPerLoad) {
      u32 a[E::kBlocksPerLoad][4];
      values.load(a, block);
      if constexpr (Values::kScaledBlocks == 0 || Values::kScaledBlocks >= kBlocks) {
        multiply<E>(block, a, b);
      } else {
        u32 scaled[kHeadTiles][2];
        scale_probabilities(scaled, b, values, block);
        multiply<E>(block, a, scaled);
      }
    }
  }

  template <class E>
  DSA_DEVICE void multiply(int block, const u32 (&a)[E::kBlocksPerLoad][4], const u32 (&b)[kHeadTiles][2]) {
#pragma unroll
    for (int i = 0; i < E::kBlocksPerLoad; ++i)
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) E::multiply_values(output[block + i][t], a[i], b[t][0], b[t][1]);
  }

  // Probabilities times the scales of the value dims from `block` on.
  template <class Values>
  static DSA_DEVICE void scale_probabilities(u32 (&scaled)[kHeadTiles][2], const u32 (&b)[kHeadTiles][2], const Values& values,
                                             int block) {
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) scaled[t][half] = ptx::mul_bf16x2(b[t][half], values.factors(block, half));
  }

  // From the dims that the main encoding gives a lane to those that the extra one does: of 32 dims, rows r and r + 8 of
  // blocks 0 and 1 hold dims 2 r, 2 r + 1 and 16 further, and come to hold dims 4 r .. 4 r + 3. Each lane sends a block to
  // one lane and the other to another, and receives as many.
  DSA_DEVICE void reorder_output() {
    const int r = lane / 4, own = 8 * (r % 4) + lane % 4;
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2)
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float received[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float sent = output[block + 0][t][e], other = output[block + 1][t][e];
            received[i] = ptx::float_of(ptx::shuffle(ptx::bits_of(r % 2 == i ? sent : other), own + 4 * (r < 4 ? i : 1 - i)));
          }
          output[block][t][e] = r < 4 ? received[0] : received[1];
          output[block + 1][t][e] = r < 4 ? received[1] : received[0];
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
    if constexpr (kPlainDims > 0) {
      if (is_plain())
        write_pairs<false>(target, head_stride, store);
      else
        write_pairs<true>(target, head_stride, store);
    } else {
      write_pairs<ExtraEncoding::kRowsAreNeighbours>(target, head_stride, store);
    }
  }

  template <bool kRowsAreNeighbours, class Element, class Store>
  DSA_DEVICE void write_pairs(Element* target, i64 head_stride, Store store) {
    // Block rows r = lane / 4 and r + 8 are neighbouring dims, or dims r, r + 8: then lanes with even r take dims r, r + 1
    // and those with odd r dims r + 7, r + 8, after one exchange with lane ^ 4.
    const bool odd = lane / 4 % 2;
    int first = lane / 4 + (odd ? 7 : 0);
    if constexpr (kRowsAreNeighbours) first = ExtraEncoding::lane_dim(lane);
    target += warp * kDims + first;
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
          if constexpr (!kRowsAreNeighbours) {
            const float received = ptx::float_of(ptx::shuffle_xor(ptx::bits_of(odd ? a : b), 4));
            if (odd) a = received;
            else b = received;
          }
          int dim = 16 * block;
          if constexpr (kRowsAreNeighbours) dim = ExtraEncoding::block_dim(block);
          if (h < heads) store(at + dim, a, b);
        }
      }
  }
};

}  // namespace sparse_decode
