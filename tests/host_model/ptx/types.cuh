// Fixed-width types, and CUDA's keywords for a host compiler.
#pragma once
#include <machine.h>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

#define DSA_DEVICE inline
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
