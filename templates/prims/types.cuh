// Own fixed-width types: the rendered unit includes nothing, so its text is complete.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "LP64 target expected");

#define DSA_DEVICE __device__ __forceinline__
