// Floating-point arithmetic: f32 and f64. Approximations are at least as good as PTX asks for.
#include <cfenv>
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

// 2^x to 1 ulp: nearest whole part, a polynomial for the rest, two steps of scaling so that subnormals come out.
inline float power_of_two(float x) {
  const float inside = x < -160.0f ? -160.0f : x > 160.0f ? 160.0f : x;
  const float whole = std::nearbyint(inside), rest = inside - whole;
  float p = 1.535336188e-4f;
  p = std::fma(p, rest, 1.339887440e-3f);
  p = std::fma(p, rest, 9.618437357e-3f);
  p = std::fma(p, rest, 5.550332471e-2f);
  p = std::fma(p, rest, 2.402264791e-1f);
  p = std::fma(p, rest, 6.931472028e-1f);
  p = std::fma(p, rest, 1.0f);
  const i32 exponent = static_cast<i32>(whole), half = exponent / 2;
  const float first = bits_as<float>(static_cast<u32>(half + 127) << 23);
  const float second = bits_as<float>(static_cast<u32>(exponent - half + 127) << 23);
  return x != x ? not_a_number() : p * first * second;
}

}  // namespace

#define VM_FLOAT(TYPE, T, CANON)                              \
  VM_BINARY(add_##TYPE, T, T, T, CANON(a + b))                \
  VM_BINARY(sub_##TYPE, T, T, T, CANON(a - b))                \
  VM_BINARY(mul_##TYPE, T, T, T, CANON(a* b))                 \
  VM_TERNARY(fma_##TYPE, T, T, T, T, CANON(std::fma(a, b, c))) \
  VM_BINARY(div_##TYPE, T, T, T, CANON(a / b))                \
  VM_BINARY(min_##TYPE, T, T, T, CANON(smaller(a, b)))        \
  VM_BINARY(max_##TYPE, T, T, T, CANON(larger(a, b)))         \
  VM_UNARY(abs_##TYPE, T, T, std::fabs(a))                    \
  VM_UNARY(neg_##TYPE, T, T, -a)                              \
  VM_UNARY(rcp_##TYPE, T, T, CANON(T(1) / a))                 \
  VM_UNARY(sqrt_##TYPE, T, T, CANON(std::sqrt(a)))            \
  VM_UNARY(rsqrt_##TYPE, T, T, CANON(T(1) / std::sqrt(a)))    \
  VM_BINARY(copysign_##TYPE, T, T, T, std::copysign(b, a))
VM_FLOAT(f32, float, canonical)
VM_FLOAT(f64, double, )

// The same with subnormal inputs and results flushed to zero.
VM_BINARY(add_ftz_f32, float, float, float, canonical(flush(flush(a) + flush(b))))
VM_BINARY(sub_ftz_f32, float, float, float, canonical(flush(flush(a) - flush(b))))
VM_BINARY(mul_ftz_f32, float, float, float, canonical(flush(flush(a) * flush(b))))
VM_TERNARY(fma_ftz_f32, float, float, float, float, canonical(flush(std::fma(flush(a), flush(b), flush(c)))))
VM_BINARY(div_ftz_f32, float, float, float, canonical(flush(flush(a) / flush(b))))
VM_BINARY(min_ftz_f32, float, float, float, canonical(smaller(flush(a), flush(b))))
VM_BINARY(max_ftz_f32, float, float, float, canonical(larger(flush(a), flush(b))))
VM_UNARY(abs_ftz_f32, float, float, flush(std::fabs(a)))
VM_UNARY(neg_ftz_f32, float, float, flush(-a))
VM_UNARY(rcp_ftz_f32, float, float, canonical(flush(1.0f / flush(a))))
VM_UNARY(sqrt_ftz_f32, float, float, canonical(std::sqrt(flush(a))))
VM_UNARY(rsqrt_ftz_f32, float, float, canonical(1.0f / std::sqrt(flush(a))))

VM_UNARY(ex2_f32, float, float, power_of_two(a))
VM_UNARY(ex2_ftz_f32, float, float, flush(power_of_two(flush(a))))
VM_UNARY(lg2_f32, float, float, canonical(std::log2(a)))
VM_UNARY(lg2_ftz_f32, float, float, canonical(std::log2(flush(a))))
VM_UNARY(sin_f32, float, float, canonical(std::sin(a)))
VM_UNARY(sin_ftz_f32, float, float, canonical(flush(std::sin(flush(a)))))
VM_UNARY(cos_f32, float, float, canonical(std::cos(a)))
VM_UNARY(tanh_f32, float, float, canonical(std::tanh(a)))

// ---- the rest, by flags: rounding, flushing, saturation ----
namespace {

enum Operation : i32 { kAdd, kSub, kMul, kFma, kDiv, kRcp, kSqrt, kMin, kMax, kAbs, kNeg, kRsqrt };
// flags: bits 0-1 rounding as in fesetround's order below, 2 flush, 3 saturate, 4 NaN wins, 5 sign of the product with
// the magnitude, 6 relu, 7-8 how many sources.
struct Modifiers {
  int rounding;
  bool flushes, saturates, nan, sign_of_product;
  u32 sources;
  explicit Modifiers(u32 flags)
      : rounding(flags & 3), flushes(flags >> 2 & 1), saturates(flags >> 3 & 1), nan(flags >> 4 & 1),
        sign_of_product(flags >> 5 & 1), sources(flags >> 7 & 3) {}
};

// Volatile, so that no operation leaves the stretch between the changes of the rounding mode.
template <class T>
T calculate(Operation operation, T first, T second, T third) {
  volatile T a = first, b = second, c = third, out = 0;
  switch (operation) {
    case kAdd: out = a + b; break;
    case kSub: out = a - b; break;
    case kMul: out = a * b; break;
    case kFma: out = std::fma(a, b, c); break;
    case kDiv: out = a / b; break;
    case kRcp: out = T(1) / a; break;
    case kSqrt: out = std::sqrt(a); break;
    case kRsqrt: out = T(1) / std::sqrt(a); break;
    case kAbs: out = std::fabs(a); break;
    case kNeg: out = -a; break;
    default: break;
  }
  return out;
}

template <class T>
T extreme(const Modifiers& m, bool is_min, T a, T b) {
  if (m.nan && (a != a || b != b)) return std::nan("");
  if (!m.sign_of_product) return is_min ? smaller(a, b) : larger(a, b);
  const bool negative = std::signbit(a) != std::signbit(b);
  const T x = std::fabs(a), y = std::fabs(b), out = is_min ? smaller(x, y) : larger(x, y);
  return negative ? -out : out;
}

template <class T>
T flushed(bool flushes, T x) {
  if constexpr (sizeof(T) == 4)
    return flushes ? flush(x) : x;
  else
    return x;
}

template <class T>
T result_of(const Modifiers& m, Operation operation, T a, T b, T c) {
  a = flushed(m.flushes, a), b = flushed(m.flushes, b), c = flushed(m.flushes, c);
  T out;
  if (operation == kMin || operation == kMax) {
    out = extreme(m, operation == kMin, a, b);
    if (m.sources == 3) out = extreme(m, operation == kMin, out, c);
  } else {
    out = calculate(operation, a, b, c);
  }
  out = flushed(m.flushes, out);
  if (m.saturates) out = out > 0 ? (out > 1 ? T(1) : out) : T(0);
  if constexpr (sizeof(T) == 4)
    return out != out ? not_a_number() : out;
  else
    return out;
}

// Operands: d, then the sources; imm is the operation.
template <class T>
void arithmetic(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  const Modifiers m(i.flags);
  const u32 *a = w.row(x[1]), *b = w.row(x[m.sources > 1 ? 2 : 1]), *c = w.row(x[m.sources > 2 ? 3 : 1]);
  u32* d = w.row(x[0]);
  const auto operation = static_cast<Operation>(i.imm);
  T out[kLanes];
  std::fesetround(kModes[m.rounding]);
  each_lane(mask, [&](int l) { out[l] = result_of<T>(m, operation, get<T>(a, l), get<T>(b, l), get<T>(c, l)); });
  std::fesetround(FE_TONEAREST);
  each_lane(mask, [&](int l) { put<T>(d, l, out[l]); });
}

// Two f32 in a 64-bit register.
void arithmetic_pair(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  const Modifiers m(i.flags);
  const u32 *a = w.row(x[1]), *b = w.row(x[m.sources > 1 ? 2 : 1]), *c = w.row(x[m.sources > 2 ? 3 : 1]);
  u32* d = w.row(x[0]);
  const auto operation = static_cast<Operation>(i.imm);
  std::fesetround(kModes[m.rounding]);
  for (int half = 0; half < 2; half++) {
    const int at = half * kLanes;
    float out[kLanes];
    each_lane(mask, [&](int l) {
      out[l] = result_of<float>(m, operation, get<float>(a + at, l), get<float>(b + at, l), get<float>(c + at, l));
    });
    each_lane(mask, [&](int l) { put<float>(d + at, l, out[l]); });
  }
  std::fesetround(FE_TONEAREST);
}

// Conversions whose result is rounded another way than to the nearest go through cvt; testp: operands p, a.
template <class T>
void test_kind(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32 bits = 0;
  for (int l = 0; l < kLanes; l++) {
    const T a = get<T>(w.row(x[1]), l);
    const int kind = std::fpclassify(a);
    bool is = false;
    switch (i.imm) {
      case 0: is = std::isfinite(a); break;
      case 1: is = kind == FP_INFINITE; break;
      case 2: is = kind != FP_NAN; break;
      case 3: is = kind == FP_NAN; break;
      case 4: is = kind == FP_NORMAL; break;
      case 5: is = kind == FP_SUBNORMAL; break;
    }
    bits |= static_cast<u32>(is) << l;
  }
  w.set_predicate(x[0], mask, bits);
}

const Register registers[] = {{"arithmetic_f32", arithmetic<float>},
                              {"arithmetic_f64", arithmetic<double>},
                              {"arithmetic_pair_f32", arithmetic_pair},
                              {"testp_f32", test_kind<float>},
                              {"testp_f64", test_kind<double>}};

}  // namespace
}  // namespace vm
