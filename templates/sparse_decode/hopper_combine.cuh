// Combining splits in the grid that computed them: one launch instead of two. Every split waits until all splits of its query
// token and head group have written their partials, and then combines a part of the heads and dims.
//
//   value warps   | partials | B | arrive .. wait for all splits | B | combine units warp x splits + split, ..
//
//   B        barrier 3 of the value threads: what they have written is released by one of them, and acquired by it for all.
//   p.arrivals  two counters for a query token and head group, zeros before and after a call: splits that have arrived, and
//               splits that know that all have. The last of these clears both.
//
// The wait needs every CTA of the grid resident, so the launch is cooperative. The arithmetic is that of combine.cuh in the
// same order, so that a row's bits do not depend on how many launches there are.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/grid_sync.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/constants.cuh"
#include "sparse_decode/work.cuh"

namespace sparse_decode {

template <class C, class Params>
struct GridCombine {
  static constexpr int kThreads = 32 * C::kValueWarps;
  static constexpr int kUnitDims = 128;  // of a head, 4 a lane
  static constexpr int kHeadUnits = C::kValueDims / kUnitDims;
  static constexpr int kAtOnce = 8;  // loads in flight; divides 32

  const Params& p;
  const Work<C, Params>& work;
  const int warp, lane;

  DSA_DEVICE GridCombine(const Params& params, const Work<C, Params>& item, int warp_, int lane_)
      : p(params), work(item), warp(warp_), lane(lane_) {}

  DSA_DEVICE void run() const {
    meet();
    const int units = work.heads(p) * kHeadUnits;
    // Over the splits first: with few units no CTA has two before each has one.
    for (int unit = warp * p.num_splits + static_cast<int>(work.split); unit < units; unit += C::kValueWarps * p.num_splits)
      combine(work.first_head + unit / kHeadUnits, unit % kHeadUnits * kUnitDims + 4 * lane);
  }

 private:
  DSA_DEVICE void meet() const {
    ptx::barrier_sync(3, kThreads);  // B
    if (warp == 0 && lane == 0) {
      const i64 group = static_cast<i64>(work.row) * p.head_groups + ptx::block_index() % p.head_groups;
      u32* const counters = p.arrivals + 2 * group;
      const u32 splits = static_cast<u32>(p.num_splits);
      ptx::global_add_release(counters, 1);
#pragma unroll 1
      while (ptx::global_load_acquire(counters) != splits) {
      }
      if (ptx::global_fetch_add_ordered(counters + 1, 1) == splits - 1) counters[0] = 0, counters[1] = 0;
    }
    ptx::barrier_sync(3, kThreads);  // B
  }

  // Four dims of a head.
  DSA_DEVICE void combine(int head, int dim) const {
    const i64 row = work.row;
    const float* lse = p.lse_accum + row * p.num_splits * p.heads + head;
    const float total = logsumexp2(lse);
    const bool empty = total == -kInfinity;
    float weight_base = total;
    if (p.attn_sink != nullptr && !empty) {
      // G + log2(1 + 2^(z - G)); 2^(l - inf) = 0 when the sink is +inf.
      const float sink = p.attn_sink[head] * kLog2E;
      weight_base = total + ptx::log2_approx(1.0f + ptx::exp2_approx(sink - total));
    }
    const i64 batch = work.batch(p), token = work.token(p);
    if (dim == 0) p.lse[batch * p.lse_stride_b + token * p.lse_stride_s + head * p.lse_stride_h] = empty ? p.empty_lse : total * p.lse_unit;
    float out[4] = {};
    if (!empty) accumulate(out, lse, weight_base, p.o_accum + (row * p.num_splits * p.heads + head) * C::kValueDims + dim);
    u16* target = p.out + batch * p.out_stride_b + token * p.out_stride_s + head * p.out_stride_h + dim;
    reinterpret_cast<u32*>(target)[0] = ptx::pack_bf16(out[0], out[1]);
    reinterpret_cast<u32*>(target)[1] = ptx::pack_bf16(out[2], out[3]);
  }

  DSA_DEVICE float split_lse(const float* lse, int split) const {
    return split < p.num_splits ? lse[static_cast<i64>(split) * p.heads] : -kInfinity;
  }

  DSA_DEVICE float logsumexp2(const float* lse) const {
    float top = -kInfinity;
    bool nan = false;
#pragma unroll 1
    for (int first = 0; first < p.num_splits; first += 32) {
      const float l = split_lse(lse, first + lane);
      top = l > top ? l : top;
      nan |= l != l;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const float other = ptx::float_of(ptx::shuffle_xor(ptx::bits_of(top), mask));
      top = other > top ? other : top;
    }
    if (ptx::ballot(nan) != 0) return __builtin_nanf("");
    if (top == -kInfinity) return top;
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < p.num_splits; first += 32) sum += ptx::exp2_approx(split_lse(lse, first + lane) - top);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::float_of(ptx::shuffle_xor(ptx::bits_of(sum), mask));
    return top + ptx::log2_approx(sum);
  }

  DSA_DEVICE void accumulate(float (&out)[4], const float* lse, float weight_base, const float* partial) const {
    const i64 split_stride = static_cast<i64>(p.heads) * C::kValueDims;
#pragma unroll 1
    for (int first = 0; first < p.num_splits; first += 32) {
      // Past the last split 0 whatever the base: a NaN there would read beyond the partials.
      const float weight = first + lane < p.num_splits ? ptx::exp2_approx(split_lse(lse, first + lane) - weight_base) : 0.0f;
      const int count = p.num_splits - first < 32 ? p.num_splits - first : 32;
#pragma unroll 1
      for (int j = 0; j < count; j += kAtOnce) {
        Words4 o[kAtOnce];
        float w[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          w[k] = ptx::float_of(ptx::shuffle(ptx::bits_of(weight), j + k));
          // An empty split leaves its partial unwritten: without weight it is not read.
          o[k] = ptx::load_global_16_if(w[k] != 0.0f, partial + (first + j + k) * split_stride);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          out[0] += w[k] * ptx::float_of(o[k].x);
          out[1] += w[k] * ptx::float_of(o[k].y);
          out[2] += w[k] * ptx::float_of(o[k].z);
          out[3] += w[k] * ptx::float_of(o[k].w);
        }
      }
    }
  }
};

}  // namespace sparse_decode
