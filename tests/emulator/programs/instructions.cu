// Instructions by way of the intrinsics of CUDA: what nvcc makes of them differs by architecture, the results do not.
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_fp4.h>
#include <cuda_fp6.h>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cuda/std/atomic>
#include <cuda/atomic>
#include <cuda_pipeline.h>
#include <mma.h>
namespace cg = cooperative_groups;
typedef unsigned u32;
typedef unsigned long long u64;
#define K extern "C" __global__ void
K ints(u32* o, const u32* a, const u32* b, int n) {
  int t = threadIdx.x; u32 x = a[t], y = b[t]; u32 r = 0;
  r += __umulhi(x, y) ^ __mulhi((int)x, (int)y); r ^= __popc(x) + __clz(y) + __ffs(x); r += __brev(x);
  r ^= __byte_perm(x, y, n); r += __funnelshift_l(x, y, n) ^ __funnelshift_r(x, y, n) ^ __funnelshift_lc(x, y, n) ^
      __funnelshift_rc(x,y,n);
  r += __sad((int)x, (int)y, r) + __usad(x, y, r) + __mul24((int)x, (int)y) + __umul24(x, y) + __uhadd(x, y) +
      __rhadd(x, y);
  r ^= __dp4a((int)x, (int)y, (int)r); r ^= __dp2a_lo((int)x, (int)y, (int)r);
  r += __vadd2(x, y) ^ __vmaxs2(x, y) ^ __vminu2(x,y) ^ __vabsdiffu4(x, y) ^ __vcmpgtu4(x, y) ^ __vaddss4(x,y) ^
      __vsadu4(x,y);
  r += x / (y | 1) + (int)x % ((int)y | 1) ; u64 q = ((u64)x << 32 | y);
  r += q / (b[t + 1] | 3ull) + (long long)q % (a[t + 1] | 1);
  r ^= __umul64hi(q, q * 3) ^ __clzll(q) ^ __popcll(q) ^ __brevll(q);
  r += min((int)x, (int)y) + max(x, y) + abs((int)x); r += __vimax3_s32(x,y,n) + __viaddmax_s32(x,y,n) +
      __vimax_s32_relu(x,y) + __vimax_s16x2_relu(x, y) + __viaddmin_u16x2(x,y,n) + __vibmax_s32(x,y,(bool*)&r);
  r += __fns(x, y & 31, 2);
  unsigned __int128 w = (unsigned __int128)q * q + y; r += (u32)(w >> 70); w -= (unsigned __int128)x << 60;
  r ^= (u32)(w >> 90);
  
  o[t] = r;
}
K floats(float* o, const float* a, const float* b, double* dd, int n) {
  int t = threadIdx.x; float x = a[t], y = b[t]; float r = 0; double d = dd[t];
  r += __fadd_rz(x, y) + __fadd_ru(x, y) + __fmul_rd(x, y) + __fmaf_rz(x, y, r) + __fdiv_ru(x, y) + __frcp_rz(x) +
      __fsqrt_rd(x) + __frsqrt_rn(x);
  r += sinf(x) + __sinf(x) + cosf(y) + __cosf(y) + tanhf(x) + expf(x) + __expf(y) + exp2f(x) + logf(y) + __logf(x)
      + log2f(y) + __powf(x, y) + powf(x, y) + sqrtf(x) + rsqrtf(y) + erff(x) + cbrtf(y) + fmodf(x, y) +
      hypotf(x,y) + __saturatef(x) + copysignf(x, y) + fdividef(x, y) + __fdividef(x, y) + x / y + floorf(x) +
      ceilf(y) + rintf(x) + truncf(y) + roundf(x) + fabsf(x) + fminf(x, y) + fmaxf(x, y) + fdimf(x,y) + ldexpf(x,
      n) + nearbyintf(y) + lgammaf(x) + tanf(x) + atan2f(x, y) + asinf(x) + log1pf(y) + expm1f(x);
  r += (int)x + __float2int_rn(x) + __float2uint_ru(y) + __float2ll_rd(x) + __float2ull_rz(y) + __int2float_rz(n) +
      __uint2float_ru(n) + __ll2float_rd(n * 1000003ll) + (float)d + __double2float_rz(d) + __double2int_rn(d) +
      (long long)d + __double2ull_ru(d) + isnan(x) + isinf(y) + isfinite(x) + signbit(y) + ilogbf(x) + logbf(x);
  d += __dadd_rz(d, x) + __dmul_ru(d, y) + __fma_rd(d, d, x) + __ddiv_rn(d, y) + __drcp_rn(d) + __dsqrt_rn(d) +
      sin(d) + exp(d) + log(d) + pow(d, 1.7) + sqrt(d) + rsqrt(d) + 1.0 / d + fmin(d, 2.0) + floor(d) + rint(d) +
      fmod(d, 3.0) + (double)n + __uint2double_rn(n) + __ll2double_rz(n) ;
  o[t] = r; dd[t] = d;
}
// Each result enters a sum by its bits.
#define H(to, expression, next) to = expression; s = s * 31u + *(u32*)&to; to = next
K halves(__half2* o, const __half2* a, const __half2* b, __nv_bfloat162* p, int n) {
  int t = threadIdx.x; __half2 x = a[t], y = b[t], r = x; u32 s = 0; __nv_bfloat162 u = p[t], v = p[t + 1], w = u;
  H(r, __hadd2(r, y), x); H(r, __hsub2(r, x), x); H(r, __hmul2(r, y), x); H(r, __hfma2(x, y, r), x);
  H(r, __hfma2_relu(x, y, r), x); H(r, __hfma2_sat(x, y, r), x); H(r, __hadd2_sat(x, r), x);
  H(r, __hmin2(r, y), x); H(r, __hmax2_nan(r, x), x); H(r, __habs2(r), x); H(r, __hneg2(r), x); H(r, h2exp2(r), x);
  H(r, h2exp(r), x); H(r, h2log(r), x); H(r, h2sqrt(r), x); H(r, h2rsqrt(r), x); H(r, h2rcp(r), x);
  H(r, h2sin(r), x); H(r, h2floor(r), x); H(r, h2rint(r), x); H(r, __h2div(r, y), x); H(r, h2trunc(r), x);
  H(r, h2ceil(r), x); H(r, h2tanh(r), x); H(r, h2tanh_approx(r), x); H(r, __hadd2(r, __heq2(x, y)), x);
  H(r, __hadd2(r, __hgt2(x, y)), x); if (__hbgt2(x, y)) s += 77; if (__hlt(x.x, y.y)) r.x = y.x;
  H(r, __hadd2(r, __hltu2(x, y)), x); H(w, __hadd2(w, v), u); H(w, __hsub2(w, u), u); H(w, __hmul2(u, w), u);
  H(w, __hfma2(u, v, w), u); H(w, __hfma2_relu(u, v, w), u); H(w, __hmin2(w, v), u); H(w, __hmax2_nan(w, v), u);
  H(w, __habs2(w), u); H(w, __hneg2(w), u); H(w, h2exp2(w), u); H(w, h2log2(w), u); H(w, h2sqrt(w), u);
  H(w, h2rcp(w), u); H(w, __h2div(w, v), u); H(w, h2tanh_approx(w), u); H(w, h2floor(w), u);
  if (__hge(u.x, v.y)) w.x = v.x; H(w, __hadd2(w, __hne2(u, v)), u); r.x = __hadd(r.x, __int2half_rn(n));
  r.y = __hadd(r.y, __ull2half_rz(n)); r.x = __hadd(r.x, __float2half_rz(n));
  r.x = __hadd(r.x, __double2half(1.5 * n)); n += __half2int_rn(r.x) + __half2ll_ru(r.y) + __half2ushort_rd(r.x) +
      __half2char_rz(r.y) + __bfloat162int_rn(w.x) + __bfloat162ull_rz(w.y);
  w.x = __hadd(w.x, __int2bfloat16_rn(n)); w.y = __hadd(w.y, __ull2bfloat16_rn(n));
  w.x = __hadd(w.x, __float2bfloat16_rz(n)); w.y = __hadd(w.y, __double2bfloat16(n * 1.25));
  H(w, __hadd2(w, __floats2bfloat162_rn(n, n + 1)), u); w.x = __hadd(w.x, __ushort2bfloat16_rn(n));
  H(r, __hadd2(r, __floats2half2_rn(n, n)), x); float2 f = __half22float2(r), g = __bfloat1622float2(w);
  H(r, __floats2half2_rn(f.x * g.x, f.y + g.y), x); H(r, __hfma2(r, r, __hmax2(x, __hmin2(y, r))), x);
  ((u32*)o)[t] = s; p[t] = w;
}
K narrow(u32* o, const float4* a, int n) {
  int t = threadIdx.x; float4 x = a[t];
  o[t] = __nv_fp8x4_e4m3(x).__x; o[t + 1] = __nv_fp8x4_e5m2(x).__x; o[t + 2] = __nv_fp4x4_e2m1(x).__x;
  o[t + 3] = __nv_fp6x4_e2m3(x).__x; o[t + 4] = __nv_fp6x4_e3m2(x).__x; o[t + 5] = __nv_fp8x4_e8m0(x).__x;
  __nv_fp8x4_e4m3 e; e.__x = n; float4 f = (float4)e; o[t + 6] = f.x + f.y + f.z + f.w; __nv_fp8x2_e5m2 g;
  g.__x = n; o[t + 7] = ((float2)g).x; __nv_fp4x2_e2m1 h; h.__x = n; o[t + 8] = ((float2)h).y;
  __nv_fp8x2_e8m0 i; i.__x = n; float2 j = (float2)i; o[t + 9] = j.x + j.y;
  o[t + 10] = __nv_cvt_bfloat162raw_to_e8m0x2(__floats2bfloat162_rn(x.x, x.y), __NV_SATFINITE, cudaRoundPosInf);
  o[t + 11] = __nv_cvt_halfraw2_to_fp8x2(__floats2half2_rn(x.x, x.y), __NV_SATFINITE, __NV_E4M3);
  o[t + 12] = __nv_cvt_bfloat16raw2_to_fp8x2(__floats2bfloat162_rn(x.x, x.y), __NV_SATFINITE, __NV_E5M2);
}
K warps(u32* o, u32* a, int n) {
  int t = threadIdx.x; u32 x = a[t], r = 0; u32 m = __activemask();
  r += __shfl_sync(m, x, 3) + __shfl_up_sync(m, x, 1) + __shfl_down_sync(m, x, 2, 16) + __shfl_xor_sync(m, x, 4);
  r += __ballot_sync(m, x & 1) + __any_sync(m, x) + __all_sync(m, x); r += __match_any_sync(m, x); int p;
  r += __match_all_sync(m, x, &p) + p; r += __reduce_add_sync(m, x) ^ __reduce_max_sync(m, (int)x) ^
      __reduce_and_sync(m, x) ^ __reduce_xor_sync(m, x); r += __shfl_sync(m, (double)x, 1) ;
  auto b = cg::this_thread_block(); auto tile = cg::tiled_partition<8>(b);
  r += cg::reduce(tile, x, cg::plus<u32>()); r += cg::inclusive_scan(tile, x); auto c = cg::coalesced_threads();
  r += c.size() + c.thread_rank() + c.shfl(x, 0); tile.sync(); b.sync(); r += tile.ballot(x & 2);
  r += b.group_index().x; r += __syncthreads_count(x & 1) + __syncthreads_and(x) + __syncthreads_or(x);
  auto bin = cg::binary_partition(tile, x & 1); r += bin.size(); __syncwarp(); __threadfence();
  __threadfence_block(); __threadfence_system(); __nanosleep(10); if (clock() + clock64() == 0) r++;
  o[t] = r;
}
K atomics(u32* o, float* f, double* d, u64* q, __half2* h, __nv_bfloat162* b, unsigned short* s) {
  __shared__ u32 sh[32]; __shared__ float sf[32]; __shared__ u64 sq[4]; int t = threadIdx.x; sh[t] = 1; sf[t] = 0;
  if (t < 4) sq[t] = t; __syncthreads(); u32 r = 0;
  r += atomicAdd(o, 1) + atomicSub(o, 2) + atomicExch(o + 1, t) + atomicMin((int*)o + 2, t) + atomicMax(o + 3, t) +
      atomicInc(o + 4, 7) + atomicDec(o + 5, 9) + atomicCAS(o + 6, 3, 4) + atomicAnd(o + 7, t) + atomicOr(o + 8, t)
      + atomicXor(o + 9, t);
  r += atomicAdd(sh, 1) + atomicMax((int*)sh + 1, t) + atomicCAS(sh + 2, 1, 4) + atomicInc(sh + 3, 5);
  r += atomicAdd(sf, 1.f); atomicAdd(sq, 3ull); atomicMax(sq + 1, 9ull);
  atomicAdd(f, 1.f); atomicAdd(d, 1.0); r += atomicAdd(q, 2ull) + atomicMin((long long*)q + 1, -3ll) + atomicCAS(q
      + 2, 1ull, 2ull) + atomicExch(q + 3, 5ull) + atomicAnd(q + 4, 1ull); atomicAdd(h, h[1]); atomicAdd(b, b[1]);
  atomicAdd((__half*)h + 4, __float2half(1)); atomicAdd((__nv_bfloat16*)b + 4, __float2bfloat16(2));
  r += atomicCAS(s, (unsigned short)1, (unsigned short)t);
  r += atomicAdd_system(o + 10, 1) + atomicAdd_block(o + 11, 1);
#if __CUDA_ARCH__ >= 900
  float4 v = atomicAdd((float4*)(f + 4), make_float4(1, 2, 3, 4)); r += v.x;
  float2 v2 = atomicAdd((float2*)(f + 8), make_float2(1, 2)); r += v2.y;
#endif
  cuda::atomic_ref<u32, cuda::thread_scope_device> ar(o[12]); r += ar.load(cuda::memory_order_acquire);
  ar.store(t, cuda::memory_order_release); r += ar.fetch_add(2, cuda::memory_order_acq_rel);
  ar.fetch_max(3, cuda::memory_order_relaxed); u32 e = 3; ar.compare_exchange_strong(e, 5); r += e;
  ar.fetch_or(1, cuda::memory_order_seq_cst); cuda::atomic_thread_fence(cuda::memory_order_seq_cst,
      cuda::thread_scope_system);
  cuda::atomic_ref<u64, cuda::thread_scope_block> ab(sq[2]); ab.fetch_add(1); r += ab.load();
  *(volatile u32*)(o + 20) = r; r += __ldcg(o + 21) + __ldcs(o + 22) + __ldca(o + 23) + __ldcv(o + 24) + __ldlu(o +
      25) + __ldg(o + 26); __stcg(o + 27, r); __stwt(o + 28, r); __stcs((uint4*)(o + 32), make_uint4(1, 2, 3, r));
  sh[t] += ((volatile u32*)sh)[t ^ 1]; r += sh[t];
  o[64 + t] = r + sf[t & 3];
}
K copies(float4* o, const float4* a, int n) {
  extern __shared__ float4 sm[]; int t = threadIdx.x; sm[128 + t] = a[t]; __syncthreads();
  __pipeline_memcpy_async(sm + t, a + t, 16); __pipeline_memcpy_async((float*)(sm + 64 + t), (const float*)(a + 64
      + t), 4); __pipeline_memcpy_async((float2*)(sm + 128 + t), (const float2*)(a + 64 + t), 8, 4);
  __pipeline_commit(); __pipeline_wait_prior(0); __syncthreads();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"((u32)__cvta_generic_to_shared(sm + t)), "l"(a
      + t), "r"(n)); asm volatile("cp.async.wait_all;"); __syncthreads();
  o[t] = sm[t ^ 1]; if (__isShared(o)) o[t + 1] = sm[t]; if (__isGlobal(o) && !__isLocal(o) && !__isConstant(o))
      o[t + 64] = sm[t + 128];
}
K wmmas(float* o, const __half* a, const __half* b, const __nv_bfloat16* p, const signed char* s, int* so, const
    float* tf) {
  using namespace nvcuda::wmma;
  unsigned r[8]; unsigned base = (unsigned)__cvta_generic_to_shared((void*)a); asm volatile("" : "+r"(base));
  extern __shared__ char smem[]; unsigned at = (unsigned)__cvta_generic_to_shared(smem) + threadIdx.x * 16;
  for (int n = 0; n < 8; n++) ((__half*)smem)[threadIdx.x * 8 + n] = a[threadIdx.x * 8 + n];
  __syncwarp();
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]),
      "=r"(r[2]), "=r"(r[3]) : "r"(at));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[4]), "=r"(r[5]) : "r"(at));
  float c[4] = {0, 0, 0, 0}; unsigned hc[2] = {0, 0}; int ic[4] = {};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]));
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};" :
      "+r"(hc[0]), "+r"(hc[1]) : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]));
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32"
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(ic[0]), "+r"(ic[1]), "+r"(ic[2]), "+r"(ic[3])
               : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]));
#if __CUDA_ARCH__ >= 890
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32"
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]));
#endif
#if __CUDA_ARCH__ >= 1200
  asm volatile("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e3m2.f32"
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]));
#endif
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(r[0]));
  o[threadIdx.x] = c[0] + c[1] + c[2] + c[3] + hc[0] + ic[0] + r[0];
}
