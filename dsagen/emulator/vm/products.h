// What matrix products have in common: registers of elements as fp32 values, and rows of 8 of them.
#pragma once
#include "numerics.h"

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace vm {

using Row8 = float __attribute__((vector_size(32)));
using Order8 = i32 __attribute__((vector_size(32)));

// The values of a register, lane after lane: rows of 4 W values.
inline void unpack_f16(const u32* row, float* to) {
  u16 halves[2 * kLanes];
  std::memcpy(halves, row, sizeof halves);
  half_values(halves, to, 2 * kLanes);
}
inline void unpack_bf16(const u32* row, float* to) {
  u16 halves[2 * kLanes];
  std::memcpy(halves, row, sizeof halves);
  for (int n = 0; n < 2 * kLanes; n++) to[n] = bf16_value(halves[n]);
}
// Tensor cores take the upper 19 bits.
inline void unpack_tf32(const u32* row, float* to) {
  for (int n = 0; n < kLanes; n++) to[n] = bits_as<float>(row[n] & 0xffffe000u);
}
template <Kind KIND>
inline void unpack_bytes(const u32* row, float* to) {
  static const float* const values = values_of(KIND);
  u8 bytes[4 * kLanes];
  std::memcpy(bytes, row, sizeof bytes);
  // e2m1 lies in the middle of its byte.
  for (int n = 0; n < 4 * kLanes; n++) to[n] = values[KIND == kE2M1 ? bytes[n] >> 2 & 15 : bytes[n]];
}

using Unpack = void (*)(const u32*, float*);
// By type: f16, bf16, tf32, e4m3, e5m2, e2m1, e2m3, e3m2.
constexpr Unpack kUnpack[] = {unpack_f16,          unpack_bf16,         unpack_tf32,         unpack_bytes<kE4M3>,
                              unpack_bytes<kE5M2>, unpack_bytes<kE2M1>, unpack_bytes<kE2M3>, unpack_bytes<kE3M2>};

// 8 rows of 8 values, to columns.
inline void transpose(const float* from, u32 stride, Row8* to) {
  Row8 a[8], b[8];
  for (u32 n = 0; n < 8; n++) std::memcpy(&a[n], from + n * stride, sizeof a[n]);
  constexpr Order8 kLow = {0, 8, 1, 9, 4, 12, 5, 13}, kHigh = {2, 10, 3, 11, 6, 14, 7, 15};
  for (int n = 0; n < 8; n += 2) {
    b[n] = __builtin_shuffle(a[n], a[n + 1], kLow);
    b[n + 1] = __builtin_shuffle(a[n], a[n + 1], kHigh);
  }
  constexpr Order8 kEven = {0, 1, 8, 9, 4, 5, 12, 13}, kOdd = {2, 3, 10, 11, 6, 7, 14, 15};
  for (int n = 0; n < 8; n += 4) {
    a[n] = __builtin_shuffle(b[n], b[n + 2], kEven);
    a[n + 1] = __builtin_shuffle(b[n], b[n + 2], kOdd);
    a[n + 2] = __builtin_shuffle(b[n + 1], b[n + 3], kEven);
    a[n + 3] = __builtin_shuffle(b[n + 1], b[n + 3], kOdd);
  }
  constexpr Order8 kFirst = {0, 1, 2, 3, 8, 9, 10, 11}, kSecond = {4, 5, 6, 7, 12, 13, 14, 15};
  for (int n = 0; n < 4; n++) {
    to[n] = __builtin_shuffle(a[n], a[n + 4], kFirst);
    to[n + 4] = __builtin_shuffle(a[n], a[n + 4], kSecond);
  }
}

// sum + a * b. Products of all these types are exact in fp32, so that one rounding less changes nothing.
inline Row8 add_product(Row8 sum, float a, Row8 b) {
#ifdef __FMA__
  const auto row = reinterpret_cast<__m256>(b), total = reinterpret_cast<__m256>(sum);
  return reinterpret_cast<Row8>(_mm256_fmadd_ps(_mm256_set1_ps(a), row, total));
#else
  return sum + a * b;
#endif
}

}  // namespace vm
