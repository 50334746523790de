// Narrow floating-point formats as bits.
#pragma once
#include <cmath>

#include "machine.h"

namespace vm {

inline float half_value(u16 bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
inline u16 half_bits(float x) {
  // One quiet NaN, as the hardware gives.
  return x != x ? 0x7fff : bits_as<u16>(static_cast<_Float16>(x));
}

inline float bf16_value(u16 bits) { return bits_as<float>(static_cast<u32>(bits) << 16); }
inline u16 bf16_bits(float x) {
  if (x != x) return 0x7fff;
  const u32 bits = bits_as<u32>(x);
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// A small float of E exponent bits (bias B) and M mantissa bits, subnormals included.
template <int E, int M, int B>
float small_value(u32 code) {
  const u32 exponent = code >> M & ((1u << E) - 1), mantissa = code & ((1u << M) - 1);
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - B - M)
                                        : std::ldexp(static_cast<float>(mantissa | 1u << M), static_cast<int>(exponent) - B - M);
  return code >> (E + M) & 1 ? -magnitude : magnitude;
}

inline float e4m3_value(u8 code) { return (code & 0x7f) == 0x7f ? std::nanf("") : small_value<4, 3, 7>(code); }
inline float e5m2_value(u8 code) {
  // The format is the upper byte of f16.
  return half_value(static_cast<u16>(code << 8));
}
inline float e2m1_value(u8 code) { return small_value<2, 1, 1>(code & 15); }

// To the nearest code, ties to even, saturating at the largest finite one; NaN gives `nan`.
template <int E, int M, int B>
u8 small_bits(float x, u8 largest, u8 nan) {
  if (x != x) return nan;
  const u8 sign = std::signbit(x) ? 1 << (E + M) : 0;
  const float magnitude = std::fabs(x);
  int exponent = magnitude == 0 ? 1 - B : std::ilogb(magnitude);
  if (exponent < 1 - B) exponent = 1 - B;
  if (magnitude >= 2 * small_value<E, M, B>(largest)) return sign | largest;
  // Steps of the binade; the mode of the host is to nearest, ties to even.
  const u32 steps = static_cast<u32>(std::nearbyint(std::ldexp(magnitude, M - exponent)));
  const u32 code = (static_cast<u32>(exponent + B - 1) << M) + steps;
  return static_cast<u8>(sign | (code > largest ? largest : code));
}
inline u8 e4m3_bits(float x) { return small_bits<4, 3, 7>(x, 0x7e, 0x7f); }
inline u8 e5m2_bits(float x) { return small_bits<5, 2, 15>(x, 0x7b, 0x7f); }
inline u8 e2m1_bits(float x) { return small_bits<2, 1, 1>(x, 7, 7); }

}  // namespace vm
