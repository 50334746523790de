// Operations on pairs of 16-bit floats and on the bytes of words, by way of fp64: products of 16-bit floats are exact there.
#pragma once
#include "prims/ptx/convert.cuh"
#include "prims/types.cuh"

namespace ptx {

DSA_DEVICE float value_of_f16(u32 bits) {
  const u16 half = static_cast<u16>(bits);
  _Float16 x;
  __builtin_memcpy(&x, &half, 2);
  return static_cast<float>(x);
}

// A product of two bf16 has 16 significant bits, so that fp64 holds it; rounded once, to a multiple of the last place.
DSA_DEVICE u32 product_bf16(u32 a, u32 b) {
  const double exact = static_cast<double>(float_of(a << 16)) * static_cast<double>(float_of(b << 16));
  if (exact != exact) return 0x7fff;
  if (exact == 0 || __builtin_isinf(exact)) return bits_of(static_cast<float>(exact)) >> 16;
  int exponent;
  __builtin_frexp(exact, &exponent);
  const int last = exponent - 8 > -133 ? exponent - 8 : -133;
  const double rounded = __builtin_ldexp(__builtin_nearbyint(__builtin_ldexp(exact, -last)), last);
  if (__builtin_fabs(rounded) >= 0x1p128) return exact < 0 ? 0xff80 : 0x7f80;
  return bits_of(static_cast<float>(rounded)) >> 16;
}

DSA_DEVICE u32 mul_f16x2(u32 a, u32 b) {
  return pack_f16(value_of_f16(a) * value_of_f16(b), value_of_f16(a >> 16) * value_of_f16(b >> 16));
}

DSA_DEVICE u32 mul_bf16x2(u32 a, u32 b) { return product_bf16(a & 0xffff, b & 0xffff) | product_bf16(a >> 16, b >> 16) << 16; }

DSA_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  const u64 bytes = static_cast<u64>(high) << 32 | low;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 digit = selector >> 4 * i & 15, byte = static_cast<u32>(bytes >> 8 * (digit & 7)) & 0xff;
    out |= (digit & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return out;
}

}  // namespace ptx
