// Functions that are not inlined, structures by value, pointers to functions, virtual functions, recursion, printf,
// assert and switches.
#include <cstdio>
#include <cassert>
struct Pair { int a; float b; long long c; };
__device__ __noinline__ int twice(int x) { return 2 * x + 1; }
__device__ __noinline__ Pair swap(Pair p, int k) { Pair r; r.a = p.a + k; r.b = p.b * 2; r.c = p.c - k; return r; }
__device__ __noinline__ int nested(int x) { return twice(x) + twice(x + 3); }
__device__ int even(int n); 
__device__ __noinline__ int odd(int n) { return n == 0 ? 0 : even(n - 1); }
__device__ __noinline__ int even(int n) { return n == 0 ? 1 : odd(n - 1); }
__device__ __noinline__ int add3(int x) { return x + 3; }
__device__ __noinline__ int mul3(int x) { return x * 3; }
typedef int (*Fn)(int);
__device__ Fn table[2] = {add3, mul3};
struct Base { __device__ virtual int f(int) = 0; };
struct A : Base { __device__ int f(int x) override { return x + 100; } };
struct B : Base { int k; __device__ int f(int x) override { return x * k; } };
__constant__ int lut[8] = {3, 1, 4, 1, 5, 9, 2, 6};
extern "C" __global__ void calls(int* out, int n) {
  int t = threadIdx.x;
  Pair p{t, 1.5f, 1000};
  p = swap(p, t);
  int s = nested(t);
  if (t & 1) s += twice(t);
  out[t] = s + p.a + (int)p.b + (int)p.c + lut[t & 7];
}
extern "C" __global__ void indirect(int* out, int n) {
  int t = threadIdx.x;
  out[t] = table[t & 1](t);
}
extern "C" __global__ void virt(int* out, int n) {
  int t = threadIdx.x;
  A a; B b; b.k = n;
  Base* p = t % 3 == 0 ? (Base*)&a : (Base*)&b;
  out[t] = p->f(t);
}
extern "C" __global__ void recursive(int* out, int n) { out[threadIdx.x] = n > 0 ? even(n) : 7; }
extern "C" __global__ void speaks(int* out, int n) {
  printf("thread %d of %d, %f %s %lld %c%%\n", threadIdx.x, n, 1.5, "text", 1ll << 40, 'x');
  assert(n < 5 && "too many");
  out[threadIdx.x] = n;
}
extern "C" __global__ void switches(int* out, int n) {
  int t = threadIdx.x, r = n;
  switch (t % 11) {
    case 0: r = r * 3 + out[t]; break; case 1: r ^= out[t] ; break; case 2: r += out[t] * 5; break;
    case 3: r = __popc(r + out[t]); break;
    case 4: r = __clz(r); break; case 5: r = r / (out[t] + 1); break; case 6: r = out[r & 31]; break;
    case 7: r = -out[t]; break; case 8: out[t] = 4; r = 9; break;
    default: r = 77;
  }
  out[t] = r;
}
