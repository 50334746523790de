// Sparse MLA decode for Hopper and up to 32 heads a CTA: warpgroup products on raw cache rows. One CTA handles one query
// token, one group of up to kHeads heads and one split of the index row.
//
// Swapped form: S^T[tokens x heads] = K Q^T, then O^T[dims x heads] = V^T P^T, so heads are the narrow dimension of the
// product and are padded to a multiple of 8 only. Keys and values are A operands, made in registers from raw rows; B operands,
// the query image and the probabilities, are read from shared memory by the tensor cores themselves.
//
//   producer warp        stage n = index, index + kProducers, ..: waits until freed, starts its row copies
//   score warpgroup      all 64 tokens of a tile, 16 a warp: S, softmax, P to shared memory
//   value warpgroup      half of the value dims, all heads: O in registers
//
//   time ->   producers  | wait freed | copy rows of a later stage ..
//             score      | wait landed | S of tile i+1 | B | wait drained | P | hand over | S of tile i+2 ..
//             value      | wait P of tile i | O += V P, stage by stage, freeing them | wait P of tile i+1 ..
//
//   landed[stage]   the producer's copies arrive; score and value threads wait. Parity of stage n: (n / kStages) & 1.
//   freed[stage]    every lane of the score and value warps arrives after its last read; the producer waits before refilling.
//   filled[buffer]  every score thread arrives, its stores fenced for the tensor cores; value threads wait for P of tile i:
//                   parity (i / kProbabilityBuffers) & 1.
//   drained[buffer] every value thread arrives once its products are complete; score threads wait before they overwrite it.
//   finished        every score thread arrives once; value threads wait for the output factors.
//   B  barrier_any of the score warps: whether some score outgrew the softmax reference.
//   Slow path (the first tile, then rarely): column maxima -> C -> one thread per head raises the reference -> C; the value
//   warps find the factor by which O shrinks beside the P that they take over.
//
// Splits are combined by another kernel, or by the value warps of all splits: hopper_combine.cuh.
//
// Rows without a valid id are zeros in shared memory, so that nothing stale meets a zero probability, unless their whole
// stage has none: value warps skip it, and the scores made of it are replaced.
#pragma once
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/registers.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/operand_image.cuh"
#include "sparse_decode/hopper_combine.cuh"
#include "sparse_decode/hopper_score.cuh"
#include "sparse_decode/hopper_value.cuh"
#include "sparse_decode/producer.cuh"
#include "sparse_decode/query.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Shared, class Encoding, class RowCopy, class Params, class ExtraEncoding = Encoding,
          class ExtraRowCopy = RowCopy>
struct Hopper {
  static constexpr int kConsumerWarps = C::kScoreWarps + C::kValueWarps;
  static constexpr int kThreads = 32 * (kConsumerWarps + 4);  // warps that have no work fill the producers' warpgroup
  static_assert(C::kQueryPitchBytes == tile::OperandImage<C::kHeads>::kRowBytes);
  static_assert(C::kProbabilityPitchBytes == tile::OperandImage<C::kHeads>::kRowBytes);
  static_assert(C::kProducers <= 4 && C::kValueWarps % 4 == 0 && C::kScoreWarps == 4);
  static_assert(C::kStages > C::kTileTokens / C::kStageTokens, "scores of a tile begin before the values of the last are done");
  static_assert(RowCopy::kArrivals == ExtraRowCopy::kArrivals);

  static DSA_DEVICE void run(const Params& p, Shared& shared) {
    // The combine's CTAs are placed where there is room, and wait there.
    ptx::grid_dependency_launch();
    if (ptx::thread_index() == 0) init_barriers(shared);
    ptx::barrier_sync(0, kThreads);
    const int warp = warp_index();
    if (warp < C::kValueWarps) {
      move_registers<C::kValueRegisters>();
      run_value(p, shared);
    } else if (warp < kConsumerWarps) {
      move_registers<C::kScoreRegisters>();
      run_score(p, shared);
    } else {
      move_registers<C::kProducerRegisters>();
      run_producer(p, shared);
    }
  }

 private:
  // Roles read their indices themselves: a value that outlived the branch would be held to the registers of the poorest.
  static DSA_DEVICE int warp_index() { return static_cast<int>(ptx::shuffle(ptx::thread_index() / 32, 0)); }
  static DSA_DEVICE int lane_index() { return ptx::thread_index() % 32; }

  static DSA_DEVICE void run_value(const Params& p, Shared& shared) {
    const Work<C, Params> work(p);
    start_consumer(p, shared, work);
    HopperValue<C, Shared, Encoding, ExtraEncoding, Params> value(p, shared, work, warp_index(), lane_index());
    value.run();
    value.write();
    if (p.arrivals != nullptr) GridCombine<C, Params>(p, work, warp_index(), lane_index()).run();
  }

  static DSA_DEVICE void run_score(const Params& p, Shared& shared) {
    const Work<C, Params> work(p);
    start_consumer(p, shared, work);
    HopperScore<C, Shared, Encoding, ExtraEncoding, Params>(p, shared, work, warp_index() - C::kValueWarps, lane_index()).run();
  }

  static DSA_DEVICE void run_producer(const Params& p, Shared& shared) {
    const int index = warp_index() - kConsumerWarps;
    if (index >= C::kProducers) return;
    const Work<C, Params> work(p);
    Producer<C, Shared, RowCopy, ExtraRowCopy, Params>(p, shared, work, index, lane_index()).run();
  }

  template <int kRegisters>
  static DSA_DEVICE void move_registers() {
    if constexpr (kRegisters > C::kCompiledRegisters) ptx::registers_raise<kRegisters>();
    if constexpr (kRegisters < C::kCompiledRegisters) ptx::registers_lower<kRegisters>();
  }

  static DSA_DEVICE void start_consumer(const Params& p, Shared& shared, const Work<C, Params>& work) {
    QueryImage<C, Shared, Encoding, ExtraEncoding, Params>::stage(p, shared, work, warp_index(), lane_index());
    ptx::fence_proxy_async();  // products read the image
    ptx::barrier_sync(2, 32 * kConsumerWarps);
  }

  static DSA_DEVICE void init_barriers(Shared& shared) {
#pragma unroll 1
    for (int slot = 0; slot < C::kStages; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.landed[slot]), RowCopy::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.freed[slot]), 32 * kConsumerWarps);
    }
#pragma unroll 1
    for (int buffer = 0; buffer < C::kProbabilityBuffers; ++buffer) {
      ptx::mbarrier_init(ptx::shared_address(&shared.filled[buffer]), 32 * C::kScoreWarps);
      ptx::mbarrier_init(ptx::shared_address(&shared.drained[buffer]), 32 * C::kValueWarps);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.finished[0]), 32 * C::kScoreWarps);
    RowCopy::fence_init();
  }
};

}  // namespace sparse_decode
