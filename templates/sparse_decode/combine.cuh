// Merges the splits of sparse decode: one CTA per query token and head, one thread per 4 value dims.
//
//   m = max_j l_j;  G = m + log2 sum_j 2^(l_j - m);  out = sum_j 2^(l_j - G) O_j;  lse = G
// over the splits' base-2 log-sum-exps l_j (-inf for a split without tokens, whose O_j is then never read), summed in split
// order. Every warp computes the weights itself, 32 splits at a time, and broadcasts them by shuffles: no barrier.
//
// Few tokens are a matter of latency. So many partials are asked for at once, as soon as it is known which splits have tokens;
// and where there are few CTAs, which are there before the main kernel ends, they go through all of this once without a split,
// which brings the code into the caches.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/ptx/grid.cuh"
#include "prims/ptx/memory.cuh"
#include "prims/ptx/thread.cuh"
#include "sparse_decode/constants.cuh"

namespace sparse_decode {

template <class C, class Params>
struct Combine {
  static constexpr int kThreads = C::kValueDims / 4;
  static constexpr u32 kFewCtas = 64;
  static_assert(C::kValueDims % 128 == 0, "a warp covers 128 dims");

  static DSA_DEVICE void run(const Params& p) {
    ptx::grid_dependency_launch();
#pragma unroll 1
    for (int round = ptx::grid_blocks() <= kFewCtas ? 0 : 1; round < 2; ++round) {
      if (round != 0) ptx::grid_dependency_wait();
      const int splits = round != 0 ? p.num_splits : 0;
      if (p.num_splits <= 4) {
        combine<4>(p, splits);
      } else {
        combine<16>(p, splits);
      }
    }
  }

 private:
  // Without splits nothing is read or written. kAtOnce partials are under way; divides 32.
  template <int kAtOnce>
  static DSA_DEVICE void combine(const Params& p, int splits) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const u32 item = ptx::block_index();
    const int head = item % p.heads;
    const i64 row = item / p.heads;
    const int batch = static_cast<int>(row / p.s_q), token = static_cast<int>(row % p.s_q);
    const float* lse = p.lse_accum + row * p.num_splits * p.heads + head;
    const float* partial = p.o_accum + (row * p.num_splits * p.heads + head) * C::kValueDims + 4 * thread;
    const i64 split_stride = static_cast<i64>(p.heads) * C::kValueDims;
    const float first_lse = split_lse(lse, p, lane, splits);
    u32 live = ptx::ballot(first_lse != -kInfinity);
    Words4 o[kAtOnce];
    load_partials(o, partial, split_stride, live);

    const float total = logsumexp2(first_lse, lse, p, lane, splits);
    const bool empty = total == -kInfinity;
    float weight_base = total;
    if (p.attn_sink != nullptr && !empty) {
      // G + log2(1 + 2^(z - G)); 2^(l - inf) = 0 when the sink is +inf.
      const float sink = p.attn_sink[head] * kLog2E;
      weight_base = total + ptx::log2_approx(1.0f + ptx::exp2_approx(sink - total));
    }
    if (thread == 0 && splits != 0)
      p.lse[batch * p.lse_stride_b + token * p.lse_stride_s + head * p.lse_stride_h] = empty ? p.empty_lse : total * p.lse_unit;

    float out[4] = {};
    float weight = weight_of(first_lse, weight_base, empty, lane < splits);
    add(out, o, weight, 0);
#pragma unroll 1
    for (int split = kAtOnce; split < splits; split += kAtOnce) {
      if (split % 32 == 0) {
        const float l = split_lse(lse, p, split + lane, splits);
        live = ptx::ballot(l != -kInfinity);
        weight = weight_of(l, weight_base, empty, split + lane < splits);
      }
      load_partials(o, partial + split * split_stride, split_stride, live >> split % 32);
      add(out, o, weight, split % 32);
    }
    if (splits == 0) return;
    u16* target = p.out + batch * p.out_stride_b + token * p.out_stride_s + head * p.out_stride_h + 4 * thread;
    reinterpret_cast<u32*>(target)[0] = ptx::pack_bf16(out[0], out[1]);
    reinterpret_cast<u32*>(target)[1] = ptx::pack_bf16(out[2], out[3]);
  }

  static DSA_DEVICE float split_lse(const float* lse, const Params& p, int split, int splits) {
    return split < splits ? lse[static_cast<i64>(split) * p.heads] : -kInfinity;
  }

  // Zeros for splits that are not `live`: they leave their partials unwritten.
  template <int kAtOnce>
  static DSA_DEVICE void load_partials(Words4 (&o)[kAtOnce], const float* partial, i64 split_stride, u32 live) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k, partial += split_stride) o[k] = ptx::load_global_16_if((live >> k & 1) != 0, partial);
  }

  // Past the last split 0 whatever the base.
  static DSA_DEVICE float weight_of(float l, float base, bool empty, bool is_split) {
    return is_split && !empty ? ptx::exp2_approx(l - base) : 0.0f;
  }

  // The weights are those of lanes `first` and up.
  template <int kAtOnce>
  static DSA_DEVICE void add(float (&out)[4], const Words4 (&o)[kAtOnce], float weight, int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float w = ptx::float_of(ptx::shuffle(ptx::bits_of(weight), first + k));
      out[0] += w * ptx::float_of(o[k].x);
      out[1] += w * ptx::float_of(o[k].y);
      out[2] += w * ptx::float_of(o[k].z);
      out[3] += w * ptx::float_of(o[k].w);
    }
  }

  // `first` are those of the lanes' first splits.
  static DSA_DEVICE float logsumexp2(float first, const float* lse, const Params& p, int lane, int splits) {
    float top = first > -kInfinity ? first : -kInfinity;
    bool nan = first != first;
#pragma unroll 1
    for (int block = 32; block < splits; block += 32) {
      const float l = split_lse(lse, p, block + lane, splits);
      top = l > top ? l : top;
      nan |= l != l;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      const float other = ptx::float_of(ptx::shuffle_xor(ptx::bits_of(top), mask));
      top = other > top ? other : top;
    }
    float sum = ptx::exp2_approx(first - top);
#pragma unroll 1
    for (int block = 32; block < splits; block += 32) sum += ptx::exp2_approx(split_lse(lse, p, block + lane, splits) - top);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::float_of(ptx::shuffle_xor(ptx::bits_of(sum), mask));
    const float total = top == -kInfinity ? top : top + ptx::log2_approx(sum);
    return ptx::ballot(nan) != 0 ? __builtin_nanf("") : total;
  }
};

}  // namespace sparse_decode
