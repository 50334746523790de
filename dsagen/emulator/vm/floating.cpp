// Floating-point arithmetic: f32, f64, and the 16-bit formats alone and in pairs.
#include <cmath>

#include "numerics.h"

namespace vm {
namespace {

// The operand that is a number wins; -0 < +0.
template <class T>
T smaller(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T>
T larger(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
float not_a_number() { return bits_as<float>(0x7fffffffu); }
template <class T>
T with_nan(T a, T b, T result) {
  return a != a || b != b ? static_cast<T>(not_a_number()) : result;
}

float saturate(float x) { return x != x ? 0.0f : x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }

}  // namespace

#define VM_FLOAT(TYPE, T)                                             \
  VM_BINARY(add_##TYPE, T, T, T, a + b)                               \
  VM_BINARY(sub_##TYPE, T, T, T, a - b)                               \
  VM_BINARY(mul_##TYPE, T, T, T, a * b)                               \
  VM_TERNARY(fma_##TYPE, T, T, T, T, std::fma(a, b, c))               \
  VM_BINARY(div_##TYPE, T, T, T, a / b)                               \
  VM_BINARY(min_##TYPE, T, T, T, smaller(a, b))                       \
  VM_BINARY(max_##TYPE, T, T, T, larger(a, b))                        \
  VM_UNARY(abs_##TYPE, T, T, std::fabs(a))                            \
  VM_UNARY(neg_##TYPE, T, T, -a)                                      \
  VM_UNARY(rcp_##TYPE, T, T, T(1) / a)                                \
  VM_UNARY(sqrt_##TYPE, T, T, std::sqrt(a))                           \
  VM_UNARY(rsqrt_##TYPE, T, T, T(1) / std::sqrt(a))                   \
  VM_BINARY(copysign_##TYPE, T, T, T, std::copysign(b, a))
VM_FLOAT(f32, float)
VM_FLOAT(f64, double)

// The same with subnormal inputs and results flushed to zero.
VM_BINARY(add_ftz_f32, float, float, float, flush(flush(a) + flush(b)))
VM_BINARY(sub_ftz_f32, float, float, float, flush(flush(a) - flush(b)))
VM_BINARY(mul_ftz_f32, float, float, float, flush(flush(a) * flush(b)))
VM_TERNARY(fma_ftz_f32, float, float, float, float, flush(std::fma(flush(a), flush(b), flush(c))))
VM_BINARY(div_ftz_f32, float, float, float, flush(flush(a) / flush(b)))
VM_BINARY(min_ftz_f32, float, float, float, smaller(flush(a), flush(b)))
VM_BINARY(max_ftz_f32, float, float, float, larger(flush(a), flush(b)))
VM_UNARY(abs_ftz_f32, float, float, flush(std::fabs(a)))
VM_UNARY(neg_ftz_f32, float, float, flush(-a))
VM_UNARY(rcp_ftz_f32, float, float, flush(1.0f / flush(a)))
VM_UNARY(sqrt_ftz_f32, float, float, std::sqrt(flush(a)))
VM_UNARY(rsqrt_ftz_f32, float, float, 1.0f / std::sqrt(flush(a)))

VM_BINARY(add_sat_f32, float, float, float, saturate(a + b))
VM_BINARY(sub_sat_f32, float, float, float, saturate(a - b))
VM_BINARY(mul_sat_f32, float, float, float, saturate(a * b))
VM_TERNARY(fma_sat_f32, float, float, float, float, saturate(std::fma(a, b, c)))
VM_BINARY(min_nan_f32, float, float, float, with_nan(a, b, smaller(a, b)))
VM_BINARY(max_nan_f32, float, float, float, with_nan(a, b, larger(a, b)))

VM_UNARY(ex2_f32, float, float, std::exp2(a))
VM_UNARY(ex2_ftz_f32, float, float, flush(std::exp2(flush(a))))
VM_UNARY(lg2_f32, float, float, std::log2(a))
VM_UNARY(lg2_ftz_f32, float, float, std::log2(flush(a)))
VM_UNARY(sin_f32, float, float, std::sin(a))
VM_UNARY(cos_f32, float, float, std::cos(a))
VM_UNARY(tanh_f32, float, float, std::tanh(a))

// testp: which kind of number. Operands p, a.
template <class F>
static void test_kind(Warp& w, const Ins& i, u32 mask, F kind) {
  VM_OPERANDS;
  const u32* a = w.row(x[1]);
  u32 bits = 0;
  for (int l = 0; l < kLanes; l++) bits |= static_cast<u32>(kind(get<float>(a, l))) << l;
  w.set_predicate(x[0], mask, bits);
}
#define VM_TESTP(KIND, EXPR)                                                                                \
  static void testp_##KIND(Warp& w, const Ins& i, u32 mask) {                                               \
    test_kind(w, i, mask, [](float a) -> bool { return EXPR; });                                            \
  }                                                                                                         \
  static const Register register_testp_##KIND("testp_" #KIND, testp_##KIND);
VM_TESTP(finite, std::isfinite(a))
VM_TESTP(infinite, std::isinf(a))
VM_TESTP(notanumber, a != a)
VM_TESTP(number, a == a)
VM_TESTP(normal, std::isnormal(a))
VM_TESTP(subnormal, std::fpclassify(a) == FP_SUBNORMAL)

// ---- 16-bit formats: computed in f32 (exact before the one rounding, for fma in f64), rounded once ----
#define VM_NARROW_ONE(NAME, TYPE, VALUE, BITS, EXPR2)                                    \
  VM_BINARY(NAME##_##TYPE, u16, u16, u16, BITS([](float p, float q) -> float { return EXPR2; }(VALUE(a), VALUE(b)))) \
  VM_BINARY(NAME##_##TYPE##x2, u32, u32, u32,                                            \
            (static_cast<u32>(op2_##NAME##_##TYPE(static_cast<u16>(a >> 16), static_cast<u16>(b >> 16))) << 16 | \
             op2_##NAME##_##TYPE(static_cast<u16>(a), static_cast<u16>(b))))
#define VM_NARROW(NAME, TYPE, VALUE, BITS, EXPR)                                         \
  static inline u16 op2_##NAME##_##TYPE(u16 a, u16 b) {                                  \
    const float p = VALUE(a), q = VALUE(b);                                              \
    return BITS(EXPR);                                                                   \
  }                                                                                      \
  VM_NARROW_ONE(NAME, TYPE, VALUE, BITS, EXPR)
#define VM_NARROW_ALL(TYPE, VALUE, BITS)              \
  VM_NARROW(add, TYPE, VALUE, BITS, p + q)            \
  VM_NARROW(sub, TYPE, VALUE, BITS, p - q)            \
  VM_NARROW(mul, TYPE, VALUE, BITS, p* q)             \
  VM_NARROW(min, TYPE, VALUE, BITS, smaller(p, q))    \
  VM_NARROW(max, TYPE, VALUE, BITS, larger(p, q))
VM_NARROW_ALL(f16, half_value, half_bits)
VM_NARROW_ALL(bf16, bf16_value, bf16_bits)

// A double holds product and sum of f16; of bf16 the sum may round, so the result is forced odd before it is narrowed.
static float odd_sum(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, sum = product + c;
  const double back = sum - product, error = (product - (sum - back)) + (c - back);
  u64 bits = bits_as<u64>(sum);
  if (error != 0 && std::isfinite(sum) && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : u64(-1);
  const double exact = bits_as<double>(bits);
  float narrow = static_cast<float>(exact);
  // The same once more for the step to fp32.
  u32 low = bits_as<u32>(narrow);
  if (std::isfinite(narrow) && narrow != exact && (low & 1) == 0)
    low += (exact > narrow) == (narrow > 0 || (narrow == 0 && exact > 0)) ? 1 : u32(-1);
  return bits_as<float>(low);
}
static inline u16 fma_half(u16 a, u16 b, u16 c) { return half_bits(odd_sum(half_value(a), half_value(b), half_value(c))); }
static inline u16 fma_bf16(u16 a, u16 b, u16 c) { return bf16_bits(odd_sum(bf16_value(a), bf16_value(b), bf16_value(c))); }
VM_TERNARY(fma_f16, u16, u16, u16, u16, fma_half(a, b, c))
VM_TERNARY(fma_bf16, u16, u16, u16, u16, fma_bf16(a, b, c))
#define VM_PAIR(F) \
  (static_cast<u32>(F(static_cast<u16>(a >> 16), static_cast<u16>(b >> 16), static_cast<u16>(c >> 16))) << 16 | \
   F(static_cast<u16>(a), static_cast<u16>(b), static_cast<u16>(c)))
VM_TERNARY(fma_f16x2, u32, u32, u32, u32, VM_PAIR(fma_half))
VM_TERNARY(fma_bf16x2, u32, u32, u32, u32, VM_PAIR(fma_bf16))
VM_UNARY(neg_f16, u16, u16, a ^ 0x8000)
VM_UNARY(neg_f16x2, u32, u32, a ^ 0x80008000u)
VM_UNARY(abs_f16, u16, u16, a & 0x7fff)
VM_UNARY(abs_f16x2, u32, u32, a & 0x7fff7fffu)

}  // namespace vm
