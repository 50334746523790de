// Attention of 64 heads over gathered keys, one token a CTA: a warpgroup converts keys to bf16 in a ring of two tiles, two
// others multiply, either one with half of the values. Of the size of what ships; nothing here is shipped.
// warpgroup_attention.py puts the products, of 32 and 128 accumulators, at the marks.
using u8 = unsigned char;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr int kHeads = 64, kKeys = 64, kDims = 576, kValues = 512, kRecord = 656, kStages = 2;
constexpr int kBlock = 64 * 128;             // 64 rows of 128 bytes, swizzled
constexpr int kTile = kDims / 64 * kBlock;   // of keys, and of queries
constexpr u32 kFull = 128, kEmpty = 8;       // who arrives

struct Args {
  const u8* keys;     // [count of records, 656]: 512 e4m3, 4 fp32 scales, 64 bf16
  const int* ids;     // [tokens, count]
  const uint4* query; // [tokens, 64, 576] bf16
  float* out;         // [tokens, 64, 512]
  int count;          // of ids, a multiple of 64
  float scale;        // of scores, times log2(e)
};

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ u32 place(u32 tile, int row, int unit) {
  return tile + unit / 8 * kBlock + row * 128 + ((unit % 8 ^ row % 8) << 4);
}
__device__ __forceinline__ void store_unit(u32 at, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u64 operand(u32 at, u32 leading, u32 stride) {
  return static_cast<u64>((at & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 |
         static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// 16 codes e4m3 as bf16, times a scale.
__device__ __forceinline__ u32 pair(u32 codes, float scale) {
  u32 halves, out;
  asm("{\n.reg .b16 c;\ncvt.u16.u32 c, %1;\ncvt.rn.f16x2.e4m3x2 %0, c;\n}" : "=r"(halves) : "r"(codes));
  float low, high;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(halves));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high * scale), "f"(low * scale));
  return out;
}
__device__ __forceinline__ uint4 eight(u32 a, u32 b, float scale) {
  return {pair(a & 0xffff, scale), pair(a >> 16, scale), pair(b & 0xffff, scale), pair(b >> 16, scale)};
}

__device__ void produce(const Args& args, u32 ring, u32 bars) {
  const int thread = threadIdx.x, row = thread / 2, half = thread % 2;
  const int* ids = args.ids + static_cast<u64>(blockIdx.x) * args.count;
  for (int t = 0; t < args.count / kKeys; t++) {
    const u32 stage = t % kStages, tile = ring + stage * kTile;
    wait(bars + 16 * stage + 8, t / kStages % 2 ^ 1);
    const u8* record = args.keys + static_cast<u64>(ids[t * kKeys + row]) * kRecord;
    const float2 scales = *reinterpret_cast<const float2*>(record + kValues + 8 * half);
#pragma unroll 4
    for (int n = 0; n < 16; n++) {
      const int unit = 16 * half + n;
      const uint4 codes = *reinterpret_cast<const uint4*>(record + 16 * unit);
      const float scale = n < 8 ? scales.x : scales.y;
      store_unit(place(tile, row, 2 * unit), eight(codes.x, codes.y, scale));
      store_unit(place(tile, row, 2 * unit + 1), eight(codes.z, codes.w, scale));
    }
    for (int n = 0; n < 4; n++) {
      const int unit = 4 * half + n;
      store_unit(place(tile, row, 64 + unit), *reinterpret_cast<const uint4*>(record + kValues + 16 + 16 * unit));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    arrive(bars + 16 * stage);
  }
}

__device__ __forceinline__ void multiply_scores(float (&d)[32], u64 a, u64 b, u32 adds) {
  @scores@
}
__device__ __forceinline__ void multiply_values(float (&d)[128], const u32 (&a)[4], u64 b) {
  @values@
}
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_and_wait() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+f"(d[n])::"memory");
}
__device__ __forceinline__ float of_row(float x, bool sum) {
#pragma unroll
  for (int n = 1; n < 4; n *= 2) {
    const float other = __shfl_xor_sync(0xffffffff, x, n);
    x = sum ? x + other : fmaxf(x, other);
  }
  return x;
}
__device__ __forceinline__ float power(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ void consume(const Args& args, u32 query, u32 ring, u32 bars) {
  const int thread = threadIdx.x % 128, half = threadIdx.x / 128 - 1;
  float out[128] = {}, most[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  for (int t = 0; t < args.count / kKeys; t++) {
    const u32 stage = t % kStages, tile = ring + stage * kTile;
    wait(bars + 16 * stage, t / kStages % 2);
    float score[32];
    hold(score);
    fence();
#pragma unroll
    for (int k = 0; k < kDims / 16; k++) {
      const u32 at = k / 4 * kBlock + k % 4 * 32;
      multiply_scores(score, operand(query + at, 16, 1024), operand(tile + at, 16, 1024), k > 0);
    }
    commit_and_wait();
    hold(score);
    float change[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float top = most[r];
#pragma unroll
      for (int n = 0; n < 16; n++) top = fmaxf(top, score[n / 2 * 4 + 2 * r + n % 2] * args.scale);
      top = of_row(top, false);
      change[r] = power(most[r] - top), most[r] = top;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 16; n++) {
        float& x = score[n / 2 * 4 + 2 * r + n % 2];
        x = power(x * args.scale - top), sum += x;
      }
      total[r] = total[r] * change[r] + sum;
    }
#pragma unroll
    for (int n = 0; n < 128; n++) out[n] *= change[n / 2 % 2];
    u32 share[4][4];
#pragma unroll
    for (int n = 0; n < 16; n++)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(share[n / 4][n % 4]) : "f"(score[2 * n + 1]), "f"(score[2 * n]));
    hold(out);
    fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++)
      multiply_values(out, share[k], operand(tile + half * 4 * kBlock + k * 2048, kBlock, 1024));
    commit_and_wait();
    hold(out);
    if (thread % 32 == 0) arrive(bars + 16 * stage + 8);
  }
  float* to = args.out + (static_cast<u64>(blockIdx.x) * kHeads + thread / 32 * 16 + thread % 32 / 4) * kValues;
  for (int r = 0; r < 2; r++) total[r] = 1 / of_row(total[r], true);
#pragma unroll
  for (int n = 0; n < 128; n += 2) {
    const int r = n / 2 % 2, column = half * 256 + n / 4 * 8 + thread % 4 * 2;
    *reinterpret_cast<float2*>(to + r * 8 * kValues + column) = {out[n] * total[r], out[n + 1] * total[r]};
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) attention(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 query = shared_address(memory), ring = query + kTile, bars = ring + kStages * kTile;
  if (threadIdx.x == 0) {
    for (int n = 0; n < kStages; n++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bars + 16 * n), "r"(kFull) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bars + 16 * n + 8), "r"(kEmpty) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const uint4* from = args.query + static_cast<u64>(blockIdx.x) * kHeads * kDims / 8;
  for (int n = threadIdx.x; n < kHeads * kDims / 8; n += 384) store_unit(place(query, n / (kDims / 8), n % (kDims / 8)), from[n]);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    produce(args, ring, bars);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(args, query, ring, bars);
  }
}
