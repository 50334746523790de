// Sparse MLA decode for Hopper and up to 32 heads a CTA: warpgroup products on raw cache rows. One CTA handles one query
// token, one group of up to kHeads heads and one split of the index row.
//
// Swapped form: S^T[tokens x heads] = K Q^T, then O^T[dims x heads] = V^T P^T, so heads are the narrow dimension of the
// product and are padded to a multiple of 8 only. Keys and values are A operands, made in registers from raw rows; B operands,
// the query image and the probabilities, are read from shared memory by the tensor cores themselves.
//
//   producer warp        a share of the rows of each stage: waits until freed, starts their copies
//   score warpgroup      every tile, or every second one of two groups, all 64 tokens, 16 a warp: S, softmax, P to shared memory
//   value warpgroup      half of the value dims, all heads: O in registers
//
//   time ->   producers  | wait freed | copy rows of a later stage ..
//             score      | wait landed | S of tile i+1 | turn, B | wait drained | P | hand over | S of tile i+3 ..
//             score      .. | S of tile i+2 | turn, B | wait drained | P | hand over | S of tile i+4 ..
//             value      | wait P of tile i | O += V P, stage by stage, freeing them | wait P of tile i+1 ..
//
//   landed[stage]   the producers' copies arrive; score and value threads wait. Parity of stage n: (n / kStages) & 1.
//   freed[stage]    every lane of the value warps and of the tile's score warps arrives after its last read; the producers wait.
//   filled[buffer]  a group's score threads arrive, their stores fenced for the tensor cores; value threads wait for P of tile i:
//                   parity (i / kProbabilityBuffers) & 1.
//   drained[buffer] every value thread arrives once its products are complete; score threads wait before they overwrite it.
//   finished        every score thread of group 0 arrives once; value threads wait for the output factors.
//   turn  barriers 4 and 5: a group looks at the softmax reference after the other one has, tile by tile.
//   B  barrier_any of a group: whether some score outgrew the softmax reference.
//   Slow path (the first tile, then rarely): column maxima -> C -> one thread per head raises the reference -> C; the value
//   warps find the factor by which O shrinks beside the P that they take over.
//
//   Barrier 0   value warp 0 has initialised the others; the producers wait. Score and value warps meet it at barrier 2, when
//               the query image is complete.
//
// Splits are combined by another kernel, or, where those of a query token are a cluster, by their value warps:
// hopper_combine.cuh.
//
// Rows without a valid id are zeros in shared memory, so that nothing stale meets a zero probability, unless their whole
// stage has none: value warps skip it, and the scores made of it are replaced.
#pragma once
#include "prims/ptx/barrier_arrive.cuh"
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/cluster.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/opaque.cuh"
#include "prims/ptx/registers.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/operand_image.cuh"
#include "sparse_decode/hopper_combine.cuh"
#include "sparse_decode/hopper_producer.cuh"
#include "sparse_decode/hopper_score.cuh"
#include "sparse_decode/hopper_value.cuh"
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
  static constexpr int kStartThreads = 32 * (1 + C::kProducers);
  static_assert(C::kProducers <= 4 && C::kValueWarps % 4 == 0 && C::kScoreWarps % 4 == 0);
  static constexpr bool kScoresInFewRegisters = C::kHeads > 16 && C::kScoreWarps > 4;
  static constexpr int kGroupThreads = Softmax<C, Shared, Encoding, Params>::kGroupThreads;
  static constexpr int kTileWarps = C::kValueWarps + kGroupThreads / 32;  // that read a stage
  static_assert(RowCopy::kArrivals == ExtraRowCopy::kArrivals);

  static DSA_DEVICE void run(const Params& p, Shared& shared) {
    // The combine's CTAs are placed where there is room, and wait there.
    ptx::grid_dependency_launch();
    const int warp = warp_index();
    if (warp == 0) {
      init_barriers(shared, lane_index());
      ptx::barrier_arrive(0, kStartThreads);
    }
    fetch_arguments(p);
    // All that is read, lengths first, may come from the grid before, and what is written may still be read there.
    ptx::grid_dependency_wait();
    if (warp < C::kValueWarps) {
      move_registers<C::kValueRegisters>();
      run_value(p, shared);
    } else if (warp < kConsumerWarps) {
      move_registers<C::kScoreRegisters>();
      run_score(p, shared);
      // What follows both roles is held to the registers of the poorer one, and so are these tiles.
      if (kScoresInFewRegisters) return;
    } else {
      move_registers<C::kProducerRegisters>();
      run_producer(p, shared);
      return;
    }
    if (ptx::cluster_blocks() > 1) ClusterCombine<C, Shared, Params>(p, shared, warp_index(), lane_index()).run();
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
    HopperProducer<C, Shared, RowCopy, ExtraRowCopy, Params> producer(p, shared, work, index, lane_index());
    ptx::barrier_sync(0, kStartThreads);
    producer.run();
  }

  // Brings the arguments into the constant cache: the first access to a line of them takes some 300 clk.
  static DSA_DEVICE void fetch_arguments(const Params& p) {
#pragma unroll
    for (u32 at = 0; at < sizeof(Params); at += 64) ptx::opaque(*reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(&p) + at));
  }

  template <int kRegisters>
  static DSA_DEVICE void move_registers() {
    if constexpr (kRegisters > C::kCompiledRegisters) ptx::registers_raise<kRegisters>();
    if constexpr (kRegisters < C::kCompiledRegisters) ptx::registers_lower<kRegisters>();
  }

  static DSA_DEVICE void start_consumer(const Params& p, Shared& shared, const Work<C, Params>& work) {
    QueryImage<C, Shared, Encoding, ExtraEncoding, Params>::stage(p, shared, work, warp_index(), lane_index());
    Softmax<C, Shared, Encoding, Params>::init_reference(shared, ptx::thread_index());
    ptx::fence_proxy_async();  // products read the image
    ptx::barrier_sync(2, 32 * kConsumerWarps);
  }

  // A lane for each slot.
  static DSA_DEVICE void init_barriers(Shared& shared, int lane) {
    static_assert(C::kStages <= 32 && C::kProbabilityBuffers <= C::kStages);
    if (lane < C::kStages) {
      ptx::mbarrier_init(ptx::shared_address(&shared.landed[lane]), RowCopy::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.freed[lane]), 32 * kTileWarps);
    }
    if (lane < C::kProbabilityBuffers) {
      ptx::mbarrier_init(ptx::shared_address(&shared.filled[lane]), kGroupThreads);
      ptx::mbarrier_init(ptx::shared_address(&shared.drained[lane]), 32 * C::kValueWarps);
    }
    if (lane == 0) ptx::mbarrier_init(ptx::shared_address(&shared.finished[0]), kGroupThreads);
    RowCopy::fence_init();
  }
};

}  // namespace sparse_decode
