// The warpgroups that compute scores and softmax of the Hopper body, tiles in turn: 64 tokens at once, 16 a warp.
#pragma once
#include "prims/ptx/bulk.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/mbarrier.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/opaque.cuh"
#include "prims/ptx/store_matrix.cuh"
#include "prims/ptx/thread.cuh"
#include "prims/tile/operand_image.cuh"
#include "sparse_decode/query.cuh"
#include "sparse_decode/softmax.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Shared, class Encoding, class ExtraEncoding, class Params>
struct HopperScore : Softmax<C, Shared, Encoding, Params> {
  using Base = Softmax<C, Shared, Encoding, Params>;
  using Base::group, Base::lane, Base::shared, Base::warp, Base::work, Base::kGroups, Base::kGroupThreads, Base::kTiles;
  static constexpr int kTileStages = C::kTileTokens / C::kStageTokens;
  static constexpr int kStageWarps = C::kStageTokens / 16;
  static_assert(kTileStages == 2 && C::kTileTokens == 64, "a warpgroup's product has 64 rows");
  static_assert(C::kWarpBlocks == kStageWarps, "rows without a valid id are zeros, unless their whole stage is skipped");

  // A group sees the stages of its own tiles land; that those of the other one's have, it knows by the turns up to that of its last
  // tile. So a stage may not lie where one of a later tile lay: its parity would answer for that.
  static_assert(C::kProbabilityBuffers % kGroups == 0 && C::kStages >= kGroups * kTileStages && C::kStages > kTileStages);

  DSA_DEVICE HopperScore(const Params& params, Shared& storage, const Work<C, Params>& item, int warp_, int lane_)
      : Base(params, storage, item, warp_, lane_) {}

  DSA_DEVICE void run() {
    int i = group;
    if constexpr (kSameType<Encoding, ExtraEncoding>) {
      run<Encoding>(i, work.tiles);
    } else {
      run<Encoding>(i, work.main_tiles);
      run<ExtraEncoding>(i, work.tiles);
    }
    Base::finish();
  }

 private:
  // The group's tiles of this split from i on up to end - 1, all of one encoding.
  template <class E>
  DSA_DEVICE void run(int& i, int end) {
#pragma unroll 1
    for (; i < end; i += kGroups) {
      tile<E>(i);
      // Where its stages lie is found anew rather than kept: that would take registers of the scores.
      const u32 first = ptx::opaque(i) * kTileStages;
#pragma unroll
      for (int stage = 0; stage < kTileStages; ++stage)
        ptx::mbarrier_arrive(ptx::shared_address(&shared.freed[(first + stage) % C::kStages]));
    }
  }

  template <class E>
  DSA_DEVICE void tile(int i) {
    // Addresses that are kept over tiles take registers of the scores: here all, else those that come late.
    if constexpr (kGroups > 1) lane = static_cast<int>(ptx::opaque(lane));
    // Both stages: the warps act as one, and one whose own stage has no valid row reads the other's and drops what comes of it.
    u32 rows[kTileStages], valid[kTileStages], all = 0;
#pragma unroll
    for (int stage = 0; stage < kTileStages; ++stage) {
      const u32 n = static_cast<u32>(i) * kTileStages + stage, slot = n % C::kStages;
      ptx::mbarrier_wait(ptx::shared_address(&shared.landed[slot]), n / C::kStages & 1);
      rows[stage] = ptx::shared_address(&shared.rows[slot][0][0]) + warp % kStageWarps * 16 * E::Row::kRowPitchBytes;
      valid[stage] = shared.valid[slot];
      all |= valid[stage];
    }
    const bool second = warp >= kStageWarps;
    const u32 mask = second ? valid[1] : valid[0];
    const bool live = mask != 0;
    const u32 own = second == live ? rows[1] : rows[0];
    float s[kTiles][4] = {};
    if (all != 0) E::score(s, own, ptx::swizzled_operand(query_image<!kSameType<E, Encoding>>(shared)), lane);
    Base::mask(s, live, mask >> warp % kStageWarps * 16);
    const int buffer = i % C::kProbabilityBuffers;
    const u32 drained = ptx::shared_address(&shared.drained[buffer]), before = (i / C::kProbabilityBuffers & 1) ^ 1;
    Base::await_turn(i);
    Base::take_reference();
    const bool raise = ptx::barrier_any(Base::kOwn + group, kGroupThreads, live && Base::outgrown(s));  // B
    if (raise) {
      ptx::mbarrier_wait(drained, before);
      Base::raise_reference(s, live, buffer);
    }
    Base::note_followed();
    Base::end_turn(i);
    // Round r waits for phase r - 1; in round 0 the phase before the first counts as complete.
    ptx::mbarrier_wait(drained, before);
    if (warp == 0 && lane == 0) shared.raised[buffer] = raise;
    if (live) store_probabilities<E>(s, own, buffer);
    ptx::fence_proxy_async();  // products read the probabilities
    ptx::mbarrier_arrive(ptx::shared_address(&shared.filled[buffer]));
  }

  // P = 2^(s - M), 0 of invalid tokens: added to the sums and written as 16-bit copies [head][token], one per scale group
  // where the encoding folds scales into them.
  template <class E>
  DSA_DEVICE void store_probabilities(float (&s)[kTiles][4], u32 rows, int buffer) {
    Base::exponentiate(s);
    const int lane = kGroups > 1 ? Base::lane : static_cast<int>(ptx::opaque(Base::lane));
    const u32 row = rows + lane / 4 * E::Row::kRowPitchBytes;
    const u32 image = ptx::shared_address(shared.probability[buffer]);
    const int unit = 2 * warp + lane / 8 % 2;  // of 8 tokens
#pragma unroll
    for (int copy = 0; copy < E::kProbabilityCopies; ++copy) {
      const float low = E::scale(row, copy) * E::kProbabilityScale;
      const float high = E::scale(row + 8 * E::Row::kRowPitchBytes, copy) * E::kProbabilityScale;
      const u32 piece = image + copy * tile::OperandImage<C::kHeads>::kPieceBytes;
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        const u32 a = E::pack_probabilities(s[j][0] * low, s[j][1] * low), b = E::pack_probabilities(s[j][2] * high, s[j][3] * high);
        if (j + 1 < kTiles) {
          const u32 c = E::pack_probabilities(s[j + 1][0] * low, s[j + 1][1] * low);
          const u32 d = E::pack_probabilities(s[j + 1][2] * high, s[j + 1][3] * high);
          ptx::store_matrix_x4_trans(ptx::swizzled_address(piece, 8 * j + lane / 16 * 8 + lane % 8, unit), a, b, c, d);
        } else {
          ptx::store_matrix_x2_trans(ptx::swizzled_address(piece, 8 * j + lane % 8, unit), a, b);
        }
      }
    }
  }
};

}  // namespace sparse_decode
