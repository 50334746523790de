// Combining splits in the launch that computed them: the splits of a query token are the CTAs of a cluster, 2, 4 or 8, and
// each combines a part of the heads and dims, of partials that it reads from the shared memory of all.
//
//   value warps   | B | partials to shared memory | meet | units of all splits | arrive | results | wait
//
//   B        barrier 3 of the value threads: none of them reads rows any more, and partials lie where those were.
//   meet     the cluster's barrier, by the value warps alone: the others have exited by then, or hold it up until they do.
//   wait     the same barrier: no CTA exits while its partials are read.
//
// The arithmetic is that of combine.cuh in the same order, so that a row's bits do not depend on how many launches there are.
//
// The score warps are done before the value warps, go through this code first and do nothing there: when it runs for the first
// time, it comes from DRAM. Producers have too few registers for it.
#pragma once
#include "prims/ptx/cluster.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/constants.cuh"

namespace sparse_decode {

// A CTA's partial O in the ring of rows, fp32 [head][dim], and behind each head's its log-sum-exp. The value warps write both, though
// it is a score warp that has the sums: what another CTA reads is then written by warps that take part in the meeting.
template <class C, class Shared>
struct ClusterPartials {
  // The lanes of a store have four even or four odd heads: these are 64 B apart in the banks.
  static constexpr int kPitch = C::kValueDims + 8;
  static_assert(C::kHeads * kPitch * sizeof(float) <= sizeof(Shared::rows));

  static DSA_DEVICE float* output(Shared& shared) { return reinterpret_cast<float*>(&shared.rows[0][0][0]); }
  static DSA_DEVICE float* lse(Shared& shared, int head) { return output(shared) + head * kPitch + C::kValueDims; }
};

template <class C, class Shared, class Params>
struct ClusterCombine {
  using Partials = ClusterPartials<C, Shared>;
  static constexpr int kUnitDims = 128;  // of a head, 4 a lane
  static constexpr int kHeadUnits = C::kValueDims / kUnitDims;

  const Params& p;
  Shared& shared;
  const int warp, lane;
  const bool combines;

  DSA_DEVICE ClusterCombine(const Params& params, Shared& storage, int warp_, int lane_)
      : p(params), shared(storage), warp(warp_), lane(lane_), combines(warp_ < C::kValueWarps) {}

  DSA_DEVICE void run() const {
    if (p.num_splits == 2) {
      combine<2>();
    } else if (p.num_splits == 4) {
      combine<4>();
    } else {
      combine<8>();
    }
  }

 private:
  // All units of this warp at once. As many lanes as there are splits have the weights of a unit.
  template <int kSplits>
  DSA_DEVICE void combine() const {
    constexpr int kCtaWarps = kSplits * C::kValueWarps, kUnits = (C::kHeads * kHeadUnits + kCtaWarps - 1) / kCtaWarps;
    static_assert(kUnits * kSplits <= 32);
    if (combines) ptx::cluster_arrive();
    const u32 split = ptx::block_index() % kSplits, row = ptx::block_index() / kSplits;
    const u32 batch = row / static_cast<u32>(p.s_q), token = row % static_cast<u32>(p.s_q);
    const int first = (static_cast<int>(split) * C::kValueWarps + warp) * kUnits, units = combines ? p.heads * kHeadUnits : 0;
    const int unit = first + lane / kSplits, head = unit / kHeadUnits;
    const bool is_unit = lane / kSplits < kUnits && unit < units;
    float sink = 0.0f;
    if (p.attn_sink != nullptr && is_unit) sink = p.attn_sink[head];
    if (combines) ptx::cluster_wait();

    float lse = -kInfinity;
    if (is_unit)
      lse = ptx::float_of(ptx::load_cluster_4(
          ptx::cluster_address(ptx::shared_address(Partials::lse(shared, head)), lane % kSplits)));
    u32 partials[kSplits];
#pragma unroll
    for (int s = 0; s < kSplits; ++s)
      partials[s] = ptx::cluster_address(ptx::shared_address(Partials::output(shared) + 4 * lane), s);
    Words4 o[kUnits][kSplits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const u32 offset = sizeof(float) * ((first + k) / kHeadUnits * Partials::kPitch + (first + k) % kHeadUnits * kUnitDims);
#pragma unroll
      for (int s = 0; s < kSplits; ++s) o[k][s] = ptx::load_cluster_16_if(first + k < units, partials[s] + offset);
    }

    // What a split without tokens has left is no part of a sum.
    const u32 empty_splits = ptx::ballot(is_unit && lse == -kInfinity);
    if (empty_splits != 0) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k)
#pragma unroll
        for (int s = 0; s < kSplits; ++s)
          if (empty_splits >> (k * kSplits + s) & 1) o[k][s] = Words4{0, 0, 0, 0};
    }
    const float total = logsumexp2<kSplits>(lse);
    const bool empty = total == -kInfinity;
    float weight_base = total;
    // G + log2(1 + 2^(z - G)); 2^(l - inf) = 0 when the sink is +inf.
    if (p.attn_sink != nullptr && !empty) weight_base = total + ptx::log2_approx(1.0f + ptx::exp2_approx(sink * kLog2E - total));
    const float weight = empty ? 0.0f : ptx::exp2_approx(lse - weight_base);
    float out[kUnits][4] = {};
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
#pragma unroll
      for (int s = 0; s < kSplits; ++s) add(out[k], o[k][s], ptx::float_of(ptx::shuffle(ptx::bits_of(weight), k * kSplits + s)));
    if (combines) ptx::cluster_arrive();  // nothing of the other CTAs is read any more

    if (is_unit && lane % kSplits == 0 && unit % kHeadUnits == 0)
      p.lse[batch * p.lse_stride_b + token * p.lse_stride_s + head * p.lse_stride_h] = empty ? p.empty_lse : total * p.lse_unit;
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
      if (first + k < units) write(out[k], batch * p.out_stride_b + token * p.out_stride_s, first + k);
    if (combines) ptx::cluster_wait();
  }

  // Of the splits whose lanes lie together.
  template <int kSplits>
  static DSA_DEVICE float logsumexp2(float lse) {
    float top = lse;
#pragma unroll
    for (int mask = kSplits / 2; mask > 0; mask /= 2) top = larger(top, ptx::float_of(ptx::shuffle_xor(ptx::bits_of(top), mask)));
    float sum = ptx::exp2_approx(lse - top);
#pragma unroll
    for (int mask = kSplits / 2; mask > 0; mask /= 2) sum += ptx::float_of(ptx::shuffle_xor(ptx::bits_of(sum), mask));
    return top == -kInfinity ? top : top + ptx::log2_approx(sum);
  }

  // NaN where either is.
  static DSA_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }

  static DSA_DEVICE void add(float (&out)[4], const Words4& o, float weight) {
    out[0] += weight * ptx::float_of(o.x);
    out[1] += weight * ptx::float_of(o.y);
    out[2] += weight * ptx::float_of(o.z);
    out[3] += weight * ptx::float_of(o.w);
  }

  DSA_DEVICE void write(const float (&out)[4], i64 row, int unit) const {
    const int head = unit / kHeadUnits;
    u16* target = p.out + row + head * p.out_stride_h + unit % kHeadUnits * kUnitDims + 4 * lane;
    reinterpret_cast<u32*>(target)[0] = ptx::pack_bf16(out[0], out[1]);
    reinterpret_cast<u32*>(target)[1] = ptx::pack_bf16(out[2], out[3]);
  }
};

}  // namespace sparse_decode
