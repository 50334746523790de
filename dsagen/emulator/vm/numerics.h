// Floating-point formats as bits.
#pragma once
#include <cmath>

#include "machine.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace vm {

inline float half_value(u16 bits) { return static_cast<float>(bits_as<_Float16>(bits)); }
// Of so many, a multiple of 8.
inline void half_values(const u16* halves, float* to, int count) {
#ifdef __F16C__
  for (int n = 0; n < count; n += 8)
    _mm256_storeu_ps(to + n, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + n))));
#else
  for (int n = 0; n < count; n++) to[n] = half_value(halves[n]);
#endif
}
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
inline float not_a_number() { return bits_as<float>(0x7fffffffu); }
// fp32 arithmetic has one NaN.
inline float canonical(float x) { return x != x ? not_a_number() : x; }
inline float saturate(float x) { return x > 0.0f ? (x > 1.0f ? 1.0f : x) : 0.0f; }

// Kinds of values that cvt knows. Up to kF64 and the integers they are registers of their own; the others are codes.
enum Kind : u32 {
  kF16, kBF16, kTF32, kF32, kF64, kE4M3, kE5M2, kE2M1, kE2M3, kE3M2, kUE8M0,
  kU8, kS8, kU16, kS16, kU32, kS32, kU64, kS64
};
enum Rounding : u32 { kNearestEven, kTowardZero, kDown, kUp, kNearestAway, kStochastic };

struct Format {
  int exponent_bits, mantissa_bits, bias;
  u32 largest;  // code of the largest finite value; the one after it is infinity where there is one
  bool has_infinity;
  u32 nan;  // what NaN becomes
};
constexpr Format kFormats[] = {
    {5, 10, 15, 0x7bff, true, 0x7fff},             // f16
    {8, 7, 127, 0x7f7f, true, 0x7fff},             // bf16
    {8, 10, 127, 0x3fbff, true, 0x3ffff},          // tf32, without its 13 low bits
    {8, 23, 127, 0x7f7fffff, true, 0x7fffffff},    // f32
    {11, 52, 1023, 0, true, 0},                    // f64, which is never encoded
    {4, 3, 7, 0x7e, false, 0x7f},                  // e4m3
    {5, 2, 15, 0x7b, true, 0x7f},                  // e5m2
    {2, 1, 1, 0x7, false, 0x7},                    // e2m1
    {2, 3, 1, 0x1f, false, 0x1f},                  // e2m3
    {3, 2, 3, 0x1f, false, 0x1f},                  // e3m2
};

// The code of a value. `random` is what stochastic rounding adds to the bits that are cut off, of 1.
inline u32 encode(const Format& f, double x, Rounding rounding, bool relu, bool finite, double random = 0) {
  if (x != x) return f.nan;
  const bool negative = std::signbit(x);
  if (relu && negative) return 0;
  const u32 sign = static_cast<u32>(negative) << (f.exponent_bits + f.mantissa_bits);
  const double magnitude = std::fabs(x);
  const u32 beyond = finite || !f.has_infinity ? f.largest : f.largest + 1;
  if (std::isinf(magnitude)) return sign | beyond;
  int exponent = magnitude == 0 ? 1 - f.bias : std::ilogb(magnitude);
  if (exponent < 1 - f.bias) exponent = 1 - f.bias;
  const double scaled = std::ldexp(magnitude, f.mantissa_bits - exponent);
  const double whole = std::floor(scaled), rest = scaled - whole;
  const u64 steps = static_cast<u64>(whole);
  bool up = false, to_infinity = true;
  switch (rounding) {
    case kNearestEven: up = rest > 0.5 || (rest == 0.5 && (steps & 1)); break;
    case kNearestAway: up = rest >= 0.5; break;
    case kTowardZero: to_infinity = false; break;
    case kDown: up = rest > 0 && negative, to_infinity = negative; break;
    case kUp: up = rest > 0 && !negative, to_infinity = !negative; break;
    case kStochastic: up = rest + random >= 1; break;
  }
  const u64 code = (static_cast<u64>(exponent + f.bias - 1) << f.mantissa_bits) + steps + up;
  return sign | (code <= f.largest ? static_cast<u32>(code) : to_infinity ? beyond : f.largest);
}

// The value of a code of a format without NaN and infinity.
inline float decode(const Format& f, u32 code) {
  const u32 field = code >> f.mantissa_bits & ((1u << f.exponent_bits) - 1);
  const u32 mantissa = code & ((1u << f.mantissa_bits) - 1);
  const float value = field == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - f.bias - f.mantissa_bits)
                                 : std::ldexp(static_cast<float>(mantissa | 1u << f.mantissa_bits),
                                              static_cast<int>(field) - f.bias - f.mantissa_bits);
  return code >> (f.exponent_bits + f.mantissa_bits) & 1 ? -value : value;
}

inline float e4m3_value(u32 code) { return (code & 0x7f) == 0x7f ? not_a_number() : decode(kFormats[kE4M3], code); }
inline float e5m2_value(u32 code) {
  // The format is the upper byte of f16.
  return half_value(static_cast<u16>(code << 8));
}
inline float ue8m0_value(u32 code) {
  return code == 0xff ? not_a_number() : code == 0 ? 0x1p-127f : bits_as<float>(code << 23);
}

// All values of an 8-bit format.
struct Values {
  float of[256];
  explicit Values(Kind kind);
};
// The tables of e4m3, e5m2, e2m1, e2m3, e3m2 and ue8m0.
const float* values_of(Kind kind);

}  // namespace vm
