// Merges the splits of sparse decode: one CTA per query token and head, one thread per 4 value dims.
//
//   m = max_j l_j;  G = m + log2 sum_j 2^(l_j - m);  out = sum_j 2^(l_j - G) O_j;  lse = G
// over the splits' base-2 log-sum-exps l_j (-inf for a split without tokens, whose O_j is then never read), summed in split
// order. Every warp computes the weights itself, 32 splits at a time, and broadcasts them by shuffles: no barrier.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/constants.cuh"

namespace sparse_decode {

template <class C, class Params>
struct Combine {
  static constexpr int kThreads = C::kValueDims / 4;
  static constexpr int kAtOnce = 8;  // loads in flight; divides 32
  static_assert(C::kValueDims % 128 == 0, "a warp covers 128 dims");

  static DSA_DEVICE void run(const Params& p) {
    ptx::grid_dependency_wait();
    const int thread = ptx::thread_index(), lane = thread % 32;
    const u32 item = ptx::block_index();
    const int head = item % p.heads;
    const i64 row = item / p.heads;
    const int batch = static_cast<int>(row / p.s_q), token = static_cast<int>(row % p.s_q);
    const float* lse = p.lse_accum + row * p.num_splits * p.heads + head;
    const float total = logsumexp2(lse, p, lane);
    const bool empty = total == -kInfinity;
    float weight_base = total;
    if (p.attn_sink != nullptr && !empty) {
      // G + log2(1 + 2^(z - G)); 2^(l - inf) = 0 when the sink is +inf.
      const float sink = p.attn_sink[head] * kLog2E;
      weight_base = total + ptx::log2_approx(1.0f + ptx::exp2_approx(sink - total));
    }
    if (thread == 0)
      p.lse[batch * p.lse_stride_b + token * p.lse_stride_s + head * p.lse_stride_h] = empty ? p.empty_lse : total * p.lse_unit;

    float out[4] = {};
    if (!empty) accumulate(out, lse, weight_base, p, row, head, thread, lane);
    u16* target = p.out + batch * p.out_stride_b + token * p.out_stride_s + head * p.out_stride_h + 4 * thread;
    reinterpret_cast<u32*>(target)[0] = ptx::pack_bf16(out[0], out[1]);
    reinterpret_cast<u32*>(target)[1] = ptx::pack_bf16(out[2], out[3]);
  }

 private:
  static DSA_DEVICE float split_lse(const float* lse, const Params& p, int split) {
    return split < p.num_splits ? lse[static_cast<i64>(split) * p.heads] : -kInfinity;
  }

  static DSA_DEVICE float logsumexp2(const float* lse, const Params& p, int lane) {
    float top = -kInfinity;
    bool nan = false;
    for (int first = 0; first < p.num_splits; first += 32) {
      const float l = split_lse(lse, p, first + lane);
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
    for (int first = 0; first < p.num_splits; first += 32) sum += ptx::exp2_approx(split_lse(lse, p, first + lane) - top);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::float_of(ptx::shuffle_xor(ptx::bits_of(sum), mask));
    return top + ptx::log2_approx(sum);
  }

  static DSA_DEVICE void accumulate(float (&out)[4], const float* lse, float weight_base, const Params& p, i64 row, int head,
                                    int thread, int lane) {
    const float* partial = p.o_accum + (row * p.num_splits * p.heads + head) * C::kValueDims + 4 * thread;
    const i64 split_stride = static_cast<i64>(p.heads) * C::kValueDims;
    for (int first = 0; first < p.num_splits; first += 32) {
      // Past the last split 0 whatever the base: a NaN there would read beyond the partials.
      const float weight = first + lane < p.num_splits ? ptx::exp2_approx(split_lse(lse, p, first + lane) - weight_base) : 0.0f;
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
