// cvt: between integer widths, floats and narrow floats.
#include <cmath>
#include <limits>

#include "numerics.h"

namespace vm {
namespace {

// Float to integer saturates; NaN gives 0 (for 64 bits the sign bit).
template <class I, class F>
I to_integer(F rounded) {
  using Limits = std::numeric_limits<I>;
  if (rounded != rounded) return sizeof(I) == 8 ? static_cast<I>(1ull << 63) : I(0);
  if (rounded <= static_cast<F>(Limits::min())) return Limits::min();
  if (rounded >= static_cast<F>(Limits::max())) return Limits::max();
  return static_cast<I>(rounded);
}

template <class D, class S>
D clamp_integer(S a) {
  const __int128 value = a, low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
  return static_cast<D>(value < low ? low : value > high ? high : value);
}

// A narrow signed result is sign-extended by cvt to the width of its register.
template <class D>
auto widen(D value) {
  if constexpr (sizeof(D) == 1)
    return static_cast<i16>(value);
  else
    return value;
}

}  // namespace

#define VM_WIDTH(DT, D, ST, S)                                            \
  VM_UNARY(cvt_##DT##_##ST, decltype(widen(D())), S, widen(static_cast<D>(a))) \
  VM_UNARY(cvt_sat_##DT##_##ST, decltype(widen(D())), S, (widen(clamp_integer<D, S>(a))))
#define VM_WIDTHS(ST, S)      \
  VM_WIDTH(u8, u8, ST, S)     \
  VM_WIDTH(s8, i8, ST, S)     \
  VM_WIDTH(u16, u16, ST, S)   \
  VM_WIDTH(s16, i16, ST, S)   \
  VM_WIDTH(u32, u32, ST, S)   \
  VM_WIDTH(s32, i32, ST, S)   \
  VM_WIDTH(u64, u64, ST, S)   \
  VM_WIDTH(s64, i64, ST, S)
VM_WIDTHS(u8, u8)
VM_WIDTHS(s8, i8)
VM_WIDTHS(u16, u16)
VM_WIDTHS(s16, i16)
VM_WIDTHS(u32, u32)
VM_WIDTHS(s32, i32)
VM_WIDTHS(u64, u64)
VM_WIDTHS(s64, i64)

#define VM_ROUND(IT, I, FT, F)                                                             \
  VM_UNARY(cvt_rni_##IT##_##FT, I, F, (to_integer<I, F>(std::nearbyint(a))))               \
  VM_UNARY(cvt_rzi_##IT##_##FT, I, F, (to_integer<I, F>(std::trunc(a))))                   \
  VM_UNARY(cvt_rmi_##IT##_##FT, I, F, (to_integer<I, F>(std::floor(a))))                   \
  VM_UNARY(cvt_rpi_##IT##_##FT, I, F, (to_integer<I, F>(std::ceil(a))))                    \
  VM_UNARY(cvt_rn_##FT##_##IT, F, I, static_cast<F>(a))
#define VM_ROUNDS(FT, F)          \
  VM_ROUND(u16, u16, FT, F)       \
  VM_ROUND(s16, i16, FT, F)       \
  VM_ROUND(u32, u32, FT, F)       \
  VM_ROUND(s32, i32, FT, F)       \
  VM_ROUND(u64, u64, FT, F)       \
  VM_ROUND(s64, i64, FT, F)       \
  VM_UNARY(cvt_rni_##FT##_##FT, F, F, std::nearbyint(a)) \
  VM_UNARY(cvt_rzi_##FT##_##FT, F, F, std::trunc(a))     \
  VM_UNARY(cvt_rmi_##FT##_##FT, F, F, std::floor(a))     \
  VM_UNARY(cvt_rpi_##FT##_##FT, F, F, std::ceil(a))
VM_ROUNDS(f32, float)
VM_ROUNDS(f64, double)
VM_UNARY(cvt_rn_f32_u8, float, u8, a)
VM_UNARY(cvt_rn_f32_s8, float, i8, a)
VM_UNARY(cvt_f64_f32, double, float, a)
VM_UNARY(cvt_rn_f32_f64, float, double, a)
VM_UNARY(cvt_sat_f32_f32, float, float, a != a ? 0.0f : a < 0 ? 0.0f : a > 1 ? 1.0f : a)

VM_UNARY(cvt_f32_f16, float, u16, half_value(a))
VM_UNARY(cvt_f32_bf16, float, u16, bf16_value(a))
VM_UNARY(cvt_rn_f16_f32, u16, float, half_bits(a))
VM_UNARY(cvt_rn_bf16_f32, u16, float, bf16_bits(a))
VM_UNARY(cvt_rn_relu_f16_f32, u16, float, a < 0 ? 0 : half_bits(a))
VM_UNARY(cvt_rn_relu_bf16_f32, u16, float, a < 0 ? 0 : bf16_bits(a))
VM_UNARY(cvt_rz_bf16_f32, u16, float, a != a ? 0x7fff : bits_as<u32>(a) >> 16)
VM_UNARY(cvt_rn_f16_u16, u16, u16, half_bits(a))
VM_UNARY(cvt_rn_f16_s16, u16, i16, half_bits(a))
VM_UNARY(cvt_rn_f16_u32, u16, u32, half_bits(static_cast<float>(a)))
VM_UNARY(cvt_rn_f16_s32, u16, i32, half_bits(static_cast<float>(a)))
VM_UNARY(cvt_rzi_s32_f16, i32, u16, (to_integer<i32, float>(std::trunc(half_value(a)))))
VM_UNARY(cvt_rzi_u32_f16, u32, u16, (to_integer<u32, float>(std::trunc(half_value(a)))))

// Pairs: the first source goes to the upper half.
VM_BINARY(cvt_rn_f16x2_f32, u32, float, float, static_cast<u32>(half_bits(a)) << 16 | half_bits(b))
VM_BINARY(cvt_rn_bf16x2_f32, u32, float, float, static_cast<u32>(bf16_bits(a)) << 16 | bf16_bits(b))
VM_BINARY(cvt_rn_relu_f16x2_f32, u32, float, float,
          static_cast<u32>(a < 0 ? 0 : half_bits(a)) << 16 | (b < 0 ? 0 : half_bits(b)))
VM_BINARY(cvt_rn_relu_bf16x2_f32, u32, float, float,
          static_cast<u32>(a < 0 ? 0 : bf16_bits(a)) << 16 | (b < 0 ? 0 : bf16_bits(b)))
VM_BINARY(cvt_rn_e4m3x2_f32, u16, float, float, e4m3_bits(a) << 8 | e4m3_bits(b))
VM_BINARY(cvt_rn_e5m2x2_f32, u16, float, float, e5m2_bits(a) << 8 | e5m2_bits(b))
VM_BINARY(cvt_rn_e2m1x2_f32, u8, float, float, e2m1_bits(a) << 4 | e2m1_bits(b))
VM_UNARY(cvt_rn_f16x2_e4m3x2, u32, u16,
         static_cast<u32>(half_bits(e4m3_value(static_cast<u8>(a >> 8)))) << 16 | half_bits(e4m3_value(static_cast<u8>(a))))
VM_UNARY(cvt_rn_f16x2_e5m2x2, u32, u16,
         static_cast<u32>(half_bits(e5m2_value(static_cast<u8>(a >> 8)))) << 16 | half_bits(e5m2_value(static_cast<u8>(a))))
VM_UNARY(cvt_rn_f16x2_e2m1x2, u32, u8,
         static_cast<u32>(half_bits(e2m1_value(a >> 4))) << 16 | half_bits(e2m1_value(a & 15)))
VM_UNARY(cvt_rn_e4m3x2_f16x2, u16, u32,
         e4m3_bits(half_value(static_cast<u16>(a >> 16))) << 8 | e4m3_bits(half_value(static_cast<u16>(a))))
VM_UNARY(cvt_rn_e5m2x2_f16x2, u16, u32,
         e5m2_bits(half_value(static_cast<u16>(a >> 16))) << 8 | e5m2_bits(half_value(static_cast<u16>(a))))

}  // namespace vm
