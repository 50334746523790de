// Codes of cached values, 16 dims at a time: fp32 -> code by nearest even and saturation, code -> fp32 exactly.
#pragma once
#include "prims/ptx/arithmetic.cuh"
#include "prims/ptx/convert.cuh"
#include "prims/ptx/global.cuh"
#include "prims/ptx/narrow.cuh"
#include "prims/types.cuh"

namespace kv {

constexpr int kPieceDims = 16;  // dims that a lane handles at a time
constexpr u32 kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u, kNan = 0x7fc00000u;

// One e4m3 code in integer arithmetic, for every arch; NaN gives 0x7f.
DSA_DEVICE u32 e4m3_code(float x) {
  const u32 sign = ptx::bits_of(x) >> 24 & 0x80, size = ptx::bits_of(x) & kMagnitude;
  if (size > kInfinity) return 0x7f;
  if (size >= 0x43e00000u) return sign | 0x7e;  // 448 and more
  // Under 2^-6 codes are multiples of 2^-9, which is the last bit of an fp32 in 2^14 .. 2^15.
  if (size < 0x3c800000u) return sign | (ptx::bits_of(ptx::add_rn(ptx::float_of(size), 0x1p14f)) - 0x46800000u);
  const u32 rounded = size + 0x7ffffu + (size >> 20 & 1);
  return sign | (rounded - (120u << 23)) >> 20;
}

// The code in bits 0..7 as fp32. Exact; 0x7f and 0xff are NaN.
DSA_DEVICE float float_of_e4m3(u32 code) {
  const u32 sign = (code & 0x80) << 24, size = code & 0x7f;
  if (size == 0x7f) return ptx::float_of(sign | kNan);
  // Read as an fp32's exponent and mantissa, subnormals included, a code is 2^-120 times its value.
  return ptx::mul_rn(ptx::float_of(sign | size << 20), 0x1p120f);
}

// One e2m1 code: what rounds to zero keeps its sign, NaN gives +0.
DSA_DEVICE u32 e2m1_code(float x) {
  const u32 sign = ptx::bits_of(x) >> 28 & 8, size = ptx::bits_of(x) & kMagnitude;
  if (size > kInfinity) return 0;
  if (size >= 0x40c00000u) return sign | 7;  // 6 and more
  // Under 1 codes are multiples of 1/2, the last bit of an fp32 in 2^22 .. 2^23.
  if (size < 0x3f800000u) return sign | (ptx::bits_of(ptx::add_rn(ptx::float_of(size), 0x1p22f)) - 0x4a800000u);
  const u32 rounded = size + 0x1fffffu + (size >> 22 & 1);
  return sign | (rounded - (126u << 23)) >> 22;
}

// The code in bits 0..3 as fp32. Exact.
DSA_DEVICE float float_of_e2m1(u32 code) {
  return ptx::mul_rn(ptx::float_of((code & 8) << 28 | (code & 7) << 22), 0x1p126f);
}

struct E4m3Codes {
  static constexpr int kBits = 8;

  static DSA_DEVICE void store(u8* to, const float (&x)[kPieceDims]) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = pair(x[4 * i], x[4 * i + 1]) | pair(x[4 * i + 2], x[4 * i + 3]) << 16;
    ptx::store_global_16(to, Words4{w[0], w[1], w[2], w[3]});
  }

  static DSA_DEVICE void load(const u8* from, float (&x)[kPieceDims]) {
    const Words4 w = ptx::load_global_16(from);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) x[i] = float_of_e4m3(words[i / 4] >> (i % 4 * 8));
  }

 private:
  static DSA_DEVICE u32 pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    return ptx::pack_e4m3(low, high);
#else
    return e4m3_code(low) | e4m3_code(high) << 8;
#endif
  }
};

// Even dims in the low half of a byte.
struct E2m1Codes {
  static constexpr int kBits = 4;

  static DSA_DEVICE void store(u8* to, const float (&x)[kPieceDims]) {
    u32 w[2] = {};
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) w[i / 8] |= e2m1_code(x[i]) << (i % 8 * 4);
    ptx::store_global_8(to, static_cast<u64>(w[1]) << 32 | w[0]);
  }

  static DSA_DEVICE void load(const u8* from, float (&x)[kPieceDims]) {
    const u64 w = ptx::load_global_8(from);
    const u32 words[2] = {static_cast<u32>(w), static_cast<u32>(w >> 32)};
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) x[i] = float_of_e2m1(words[i / 8] >> (i % 8 * 4));
  }
};

// 16 elements of two bytes in memory.
struct Halves {
  u32 w[8];

  static DSA_DEVICE Halves load(const u8* from) {
    const Words4 a = ptx::load_global_16(from), b = ptx::load_global_16(from + 16);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }

  DSA_DEVICE void store(u8* to) const {
    ptx::store_global_16(to, Words4{w[0], w[1], w[2], w[3]});
    ptx::store_global_16(to + 16, Words4{w[4], w[5], w[6], w[7]});
  }
};

struct Bf16Codes {
  static constexpr int kBits = 16;
  static DSA_DEVICE float number(u32 half) { return ptx::float_of(half << 16); }

  static DSA_DEVICE void store(u8* to, const float (&x)[kPieceDims]) {
    Halves halves;
#pragma unroll
    for (int i = 0; i < 8; ++i) halves.w[i] = ptx::pack_bf16(x[2 * i], x[2 * i + 1]);
    halves.store(to);
  }

  static DSA_DEVICE void load(const u8* from, float (&x)[kPieceDims]) {
    const Halves halves = Halves::load(from);
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) x[i] = number(halves.w[i / 2] >> (i % 2 * 16) & 0xffff);
  }
};

struct Fp16Codes {
  static constexpr int kBits = 16;
  static DSA_DEVICE float number(u32 half) { return ptx::float_of_f16(half); }

  static DSA_DEVICE void store(u8* to, const float (&x)[kPieceDims]) {
    Halves halves;
#pragma unroll
    for (int i = 0; i < 8; ++i) halves.w[i] = ptx::pack_f16(x[2 * i], x[2 * i + 1]);
    halves.store(to);
  }

  static DSA_DEVICE void load(const u8* from, float (&x)[kPieceDims]) {
    const Halves halves = Halves::load(from);
#pragma unroll
    for (int i = 0; i < kPieceDims; ++i) x[i] = number(halves.w[i / 2] >> (i % 2 * 16) & 0xffff);
  }
};

// Rows of plain fp32.
struct Fp32Codes {
  static constexpr int kBits = 32;

  static DSA_DEVICE void load(const u8* from, float (&x)[kPieceDims]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Words4 w = ptx::load_global_16(from + 16 * i);
      x[4 * i] = ptx::float_of(w.x), x[4 * i + 1] = ptx::float_of(w.y);
      x[4 * i + 2] = ptx::float_of(w.z), x[4 * i + 3] = ptx::float_of(w.w);
    }
  }
};

template <class A, class B>
struct IsSame {
  static constexpr bool kValue = false;
};
template <class A>
struct IsSame<A, A> {
  static constexpr bool kValue = true;
};

}  // namespace kv
