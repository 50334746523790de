// The warpgroups that sum values in the Hopper body: O^T += V^T P^T, each for half of the dims and all heads.
#pragma once
#include "prims/ptx/cluster.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/ptx/wgmma.cuh"
#include "prims/tile/operand_image.cuh"
#include "sparse_decode/hopper_combine.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

// A product takes 16 dims of each of the four warps and one copy of the probabilities, so the dims of a copy are dealt to
// the warps in turn: a warp has kPieces pieces of kPieceDims dims, one in each copy of its warpgroup.
template <class C, class Shared, class Encoding, class ExtraEncoding, class Params>
struct HopperValue {
  static constexpr int kTileStages = C::kTileTokens / C::kStageTokens;
  static constexpr int kStageSteps = C::kStageTokens / 16;
  static constexpr int kTiles = C::kHeads / 8;
  static constexpr int kGroups = C::kValueWarps / 4;
  static constexpr int kGroupDims = C::kValueDims / kGroups;
  static constexpr int kCopies = Encoding::kProbabilityCopies;
  static constexpr int kPieces = kCopies > kGroups ? kCopies / kGroups : 1;
  static constexpr int kPieceDims = kGroupDims / kPieces / 4;
  static constexpr int kPieceBlocks = kPieceDims / 16;
  static constexpr int kBlocks = kPieces * kPieceBlocks;
  static constexpr int kPlainDims = Encoding::kPlainValueDims;
  // Operands of a stage: all of them at once, or where that leaves too few registers, parts of two blocks, two at once.
  static constexpr bool kFewRegisters = C::kHeads > 16 && C::kScoreWarps > 4;
  static constexpr int kPartSteps = kFewRegisters ? 1 : kStageSteps, kPartBlocks = kFewRegisters ? 2 : kPieceBlocks;
  static constexpr int kParts = kPieces * (kStageSteps / kPartSteps) * (kPieceBlocks / kPartBlocks);
  static constexpr int kAhead = kFewRegisters ? 2 : kParts;
  static_assert(kPlainDims == 0 || kAhead == kParts, "which dims a warp has is a branch, and none may be taken while products run");
  static_assert(kSameType<Encoding, ExtraEncoding> || (kCopies == 1 && ExtraEncoding::kProbabilityCopies == 1));
  static_assert(kPlainDims == ExtraEncoding::kPlainValueDims);
  static_assert(kPieces <= 2, "the operands of all pieces are in registers at once");
  static_assert(kCopies == 1 || kCopies % kGroups == 0, "a warpgroup's dims are those of whole copies");
  static_assert(kPieceDims % (16 * Encoding::kBlocksPerLoad) == 0);
  static_assert(kPlainDims == 0 || (kPieces == 1 && kPlainDims % kPieceDims == 0), "a warp's dims are all quantised or all plain");

  const Params& p;
  Shared& shared;
  const Work<C, Params>& work;
  const int group, warp, lane;  // warp of the group
  float output[kBlocks][kTiles][4];

  DSA_DEVICE HopperValue(const Params& params, Shared& storage, const Work<C, Params>& item, int warp_, int lane_)
      : p(params), shared(storage), work(item), group(warp_ / 4), warp(warp_ % 4), lane(lane_), output{} {}

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

  // A split of a cluster writes to its shared memory.
  DSA_DEVICE void write() {
    ptx::mbarrier_wait(ptx::shared_address(&shared.finished[0]), 0);  // the output factors are in head_value
    const bool in_cluster = ptx::cluster_blocks() > 1;
    if (in_cluster) ptx::barrier_sync(3, 32 * C::kValueWarps);  // B of hopper_combine.cuh
    // Between launches an empty split has no weight and is not read.
    if (work.tiles == 0 && p.num_splits > 1 && !in_cluster) return;
    using Partials = ClusterPartials<C, Shared>;
    const int head = ptx::thread_index();
    if (in_cluster && head < C::kHeads) *Partials::lse(shared, head) = shared.reference[head];
    scale_output(shared.head_value);
    if (p.num_splits > 1) {
      // Either memory by the same code: what runs once costs as much to fetch as to run.
      float* const partials = p.o_accum + (work.partial_row(p) * p.heads + work.first_head) * C::kValueDims;
      const i64 head_stride = in_cluster ? Partials::kPitch : C::kValueDims;
      write_heads(in_cluster ? Partials::output(shared) : partials, head_stride, [](float* at, float a, float b) {
        *reinterpret_cast<u64*>(at) = static_cast<u64>(ptx::bits_of(b)) << 32 | ptx::bits_of(a);
      });
    } else {
      u16* target = p.out + work.batch(p) * p.out_stride_b + work.token(p) * p.out_stride_s + work.first_head * p.out_stride_h;
      write_heads(target, p.out_stride_h, [](u16* at, float a, float b) { *reinterpret_cast<u32*>(at) = ptx::pack_bf16(a, b); });
    }
  }

 private:
  // First dim of this warp's piece.
  DSA_DEVICE int piece_dim(int piece) const { return group * kGroupDims + piece * (4 * kPieceDims) + warp * kPieceDims; }

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

  // A tile, stage by stage; frees each stage once its values are in registers, and advances the ring. The operands of a part
  // are made while the products of those before run.
  template <class E>
  DSA_DEVICE void accumulate(int& slot, u32& parity, int buffer) {
    const u32 copies = ptx::shared_address(shared.probability[buffer]) +
                       group * kPieces * (kCopies > 1 ? tile::OperandImage<C::kHeads>::kPieceBytes : 0);
    u32 a[kAhead][kPartSteps][kPartBlocks][4];
#pragma unroll
    for (int stage = 0; stage < kTileStages; ++stage) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.landed[slot]), parity);
      const u32 rows = ptx::shared_address(&shared.rows[slot][0][0]);
      const bool live = shared.valid[slot] != 0;  // else the rows hold anything
      if (live) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (part >= kAhead) ptx::wgmma_wait<kAhead - 1>();  // before the registers of a part are made anew
          load<E>(a[part % kAhead], rows, part);
          multiply<E>(a[part % kAhead], copies, stage, part);
          if (kAhead < kParts || part == kParts - 1) ptx::wgmma_commit();
        }
        ptx::wgmma_wait<0>();
        hold_output();
      }
      ptx::mbarrier_arrive(ptx::shared_address(&shared.freed[slot]));
      advance_ring<C::kStages>(slot, parity, 1);
    }
  }

  // A part is some steps and blocks of a piece.
  static DSA_DEVICE int part_piece(int part) { return part / (kParts / kPieces); }
  static DSA_DEVICE int part_step(int part) { return part / (kPieceBlocks / kPartBlocks) * kPartSteps % kStageSteps; }
  static DSA_DEVICE int part_block(int part) { return part % (kPieceBlocks / kPartBlocks) * kPartBlocks; }

  // Whether this warp's dims are plain bf16 beside quantised ones.
  DSA_DEVICE bool is_plain() const { return kPlainDims > 0 && piece_dim(0) >= C::kValueDims - kPlainDims; }

  // A operands of a part of a stage.
  template <class E>
  DSA_DEVICE void load(u32 (&a)[kPartSteps][kPartBlocks][4], u32 rows, int part) const {
    if constexpr (kPlainDims > 0) {
      if (is_plain()) {
        load_values<E, typename E::template PlainValues<kPieceDims, kTiles>>(a, rows, part);
        return;
      }
    }
    load_values<E, typename E::template Values<kPieceDims, kTiles>>(a, rows, part);
  }

  template <class E, class Values>
  DSA_DEVICE void load_values(u32 (&a)[kPartSteps][kPartBlocks][4], u32 rows, int part) const {
#pragma unroll
    for (int k = 0; k < kPartSteps; ++k) {
      const Values values(rows + (part_step(part) + k) * 16 * E::Row::kRowPitchBytes, piece_dim(part_piece(part)), lane);
#pragma unroll
      for (int block = 0; block < kPartBlocks; block += E::kBlocksPerLoad) {
        u32 loaded[E::kBlocksPerLoad][4];
        values.load(loaded, part_block(part) + block);
#pragma unroll
        for (int b = 0; b < E::kBlocksPerLoad; ++b)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[k][block + b][i] = loaded[b][i];
      }
    }
  }

  template <class E>
  DSA_DEVICE void multiply(const u32 (&a)[kPartSteps][kPartBlocks][4], u32 copies, int stage, int part) {
    const u64 copy = ptx::swizzled_operand(copies + part_piece(part) * tile::OperandImage<C::kHeads>::kPieceBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPartSteps; ++k)
#pragma unroll
      for (int block = 0; block < kPartBlocks; ++block)
        E::add_values(output[part_piece(part) * kPieceBlocks + part_block(part) + block], a[k][block],
                      tile::OperandImage<C::kHeads>::step(copy, stage * kStageSteps + part_step(part) + k));
  }

  DSA_DEVICE void hold_output() {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::hold(output[block]);
  }

  // From the dims that the main encoding gives a lane to those that the extra one does: of 32 dims, rows r and r + 8 of
  // blocks 0 and 1 hold dims 2 r, 2 r + 1 and 16 further, and come to hold dims 4 r .. 4 r + 3. Each lane sends a block to
  // one lane and the other to another, and receives as many.
  DSA_DEVICE void reorder_output() {
    const int r = lane / 4, own = 8 * (r % 4) + lane % 4;
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
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
    for (int t = 0; t < kTiles; ++t)
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
    target += first;
    const int heads = work.heads(p);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
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
          int dim = 16 * (block % kPieceBlocks);
          if constexpr (kRowsAreNeighbours) dim = ExtraEncoding::block_dim(block % kPieceBlocks);
          if (h < heads) store(at + piece_dim(block / kPieceBlocks) + dim, a, b);
        }
      }
  }
};

}  // namespace sparse_decode
