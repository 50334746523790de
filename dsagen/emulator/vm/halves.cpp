// Arithmetic of f16 and bf16, alone and in pairs: computed in f32 or f64, rounded once.
#include <cmath>

#include "numerics.h"

namespace vm {
namespace {

// a * b + c, rounded to odd so that a later rounding to 16 bits is right.
float odd_sum(float a, float b, float c) {
  // A double holds the product; the sum may round, and then takes an odd last bit.
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

u16 add_f16(u16 a, u16 b) { return half_bits(half_value(a) + half_value(b)); }
u16 sub_f16(u16 a, u16 b) { return half_bits(half_value(a) - half_value(b)); }
u16 mul_f16(u16 a, u16 b) { return half_bits(half_value(a) * half_value(b)); }
u16 fma_f16(u16 a, u16 b, u16 c) { return half_bits(odd_sum(half_value(a), half_value(b), half_value(c))); }
u16 fma_bf16(u16 a, u16 b, u16 c) { return bf16_bits(odd_sum(bf16_value(a), bf16_value(b), bf16_value(c))); }
// fp32 has more than twice the bits, so that rounding twice is rounding once, except among subnormal products.
u16 add_bf16(u16 a, u16 b) { return bf16_bits(bf16_value(a) + bf16_value(b)); }
u16 sub_bf16(u16 a, u16 b) { return bf16_bits(bf16_value(a) - bf16_value(b)); }
u16 mul_bf16(u16 a, u16 b) {
  const float p = bf16_value(a), q = bf16_value(b), product = p * q;
  return bf16_bits(std::fabs(product) < 0x1p-100f ? odd_sum(p, q, std::copysign(0.0f, product)) : product);
}

template <u16 (*F)(u16, u16)>
u32 both(u32 a, u32 b) {
  return static_cast<u32>(F(static_cast<u16>(a >> 16), static_cast<u16>(b >> 16))) << 16 |
         F(static_cast<u16>(a), static_cast<u16>(b));
}
template <u16 (*F)(u16, u16, u16)>
u32 both(u32 a, u32 b, u32 c) {
  return static_cast<u32>(F(static_cast<u16>(a >> 16), static_cast<u16>(b >> 16), static_cast<u16>(c >> 16))) << 16 |
         F(static_cast<u16>(a), static_cast<u16>(b), static_cast<u16>(c));
}

}  // namespace

#define VM_HALF(TYPE)                                                           \
  VM_BINARY(add_##TYPE, u16, u16, u16, add_##TYPE(a, b))                        \
  VM_BINARY(sub_##TYPE, u16, u16, u16, sub_##TYPE(a, b))                        \
  VM_BINARY(mul_##TYPE, u16, u16, u16, mul_##TYPE(a, b))                        \
  VM_TERNARY(fma_##TYPE, u16, u16, u16, u16, fma_##TYPE(a, b, c))               \
  VM_BINARY(add_##TYPE##x2, u32, u32, u32, both<add_##TYPE>(a, b))              \
  VM_BINARY(sub_##TYPE##x2, u32, u32, u32, both<sub_##TYPE>(a, b))              \
  VM_BINARY(mul_##TYPE##x2, u32, u32, u32, both<mul_##TYPE>(a, b))              \
  VM_TERNARY(fma_##TYPE##x2, u32, u32, u32, u32, both<fma_##TYPE>(a, b, c))
VM_HALF(f16)
VM_HALF(bf16)
VM_UNARY(neg_f16, u16, u16, a ^ 0x8000)
VM_UNARY(neg_f16x2, u32, u32, a ^ 0x80008000u)
VM_UNARY(abs_f16, u16, u16, a & 0x7fff)
VM_UNARY(abs_f16x2, u32, u32, a & 0x7fff7fffu)

// ---- the rest, by flags ----
namespace {

enum Operation : i32 { kAdd, kSub, kMul, kFma, kMin, kMax, kEx2, kTanh, kAbs, kNeg };
// flags: bit 0 bf16, 1 a pair, 2 flush, 3 saturate, 4 NaN wins, 5 sign of the product, 6 relu, 7-8 how many sources.
struct Modifiers {
  bool brain, pair, flushes, saturates, nan, sign_of_product, relu;
  u32 sources;
  explicit Modifiers(u32 flags)
      : brain(flags & 1), pair(flags >> 1 & 1), flushes(flags >> 2 & 1), saturates(flags >> 3 & 1), nan(flags >> 4 & 1),
        sign_of_product(flags >> 5 & 1), relu(flags >> 6 & 1), sources(flags >> 7 & 3) {}
  float value(u16 bits) const { return brain ? bf16_value(bits) : half_value(bits); }
  u16 code(float x) const { return brain ? bf16_bits(x) : half_bits(x); }
  // Subnormals of the format.
  u16 flushed(u16 bits) const {
    const u16 exponents = brain ? 0x7f80 : 0x7c00;
    return flushes && (bits & exponents) == 0 ? bits & 0x8000 : bits;
  }
};

bool is_nan(const Modifiers& m, u16 bits) { return (bits & 0x7fff) > (m.brain ? 0x7f80 : 0x7c00); }

// Of two codes; -0 < +0.
u16 extreme(const Modifiers& m, bool is_min, u16 a, u16 b) {
  const u16 nan = 0x7fff;
  if (m.nan && (is_nan(m, a) || is_nan(m, b))) return nan;
  u16 sign = 0;
  if (m.sign_of_product) sign = (a ^ b) & 0x8000, a &= 0x7fff, b &= 0x7fff;
  if (is_nan(m, a)) return is_nan(m, b) ? nan : static_cast<u16>(b | sign);
  if (is_nan(m, b)) return static_cast<u16>(a | sign);
  // Codes in the order of their values.
  const auto order = [](u16 bits) {
    return bits & 0x8000 ? -static_cast<int>(bits & 0x7fff) - 1 : static_cast<int>(bits);
  };
  const u16 out = (order(a) < order(b)) == is_min ? a : b;
  return static_cast<u16>(out | sign);
}

u16 calculated(const Modifiers& m, Operation operation, u16 a, u16 b, u16 c) {
  const float p = m.value(a), q = m.value(b), r = m.value(c);
  switch (operation) {
    case kAdd: return m.code(odd_sum(p, 1.0f, q));
    case kSub: return m.code(odd_sum(q, -1.0f, p));
    case kMul: return m.code(odd_sum(p, q, std::copysign(0.0f, p * q)));
    case kFma: return m.code(odd_sum(p, q, r));
    case kEx2: return m.code(std::exp2(p));
    case kTanh: return m.code(std::tanh(p));
    case kAbs: return a & 0x7fff;
    case kNeg: return a ^ 0x8000;
    default: return 0;
  }
}

u16 result_of(const Modifiers& m, Operation operation, u16 a, u16 b, u16 c) {
  a = m.flushed(a), b = m.flushed(b), c = m.flushed(c);
  u16 out;
  if (operation == kMin || operation == kMax) {
    out = extreme(m, operation == kMin, a, b);
    if (m.sources == 3) out = extreme(m, operation == kMin, out, c);
  } else {
    out = m.flushed(calculated(m, operation, a, b, c));
  }
  if (m.saturates) {
    const u16 one = m.brain ? 0x3f80 : 0x3c00;
    out = is_nan(m, out) || (out & 0x8000) ? 0 : out > one ? one : out;
  }
  if (m.relu) out = is_nan(m, out) ? 0x7fff : (out & 0x8000) ? 0 : out;
  return out;
}

// Operands: d, then the sources; imm is the operation.
void arithmetic_half(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const Modifiers m(i.flags);
  const auto operation = static_cast<Operation>(i.imm);
  const u32 *a = w.row(x[1]), *b = w.row(x[m.sources > 1 ? 2 : 1]), *c = w.row(x[m.sources > 2 ? 3 : 1]);
  u32* d = w.row(x[0]);
  each_lane(mask, [&](int l) {
    u32 out = result_of(m, operation, static_cast<u16>(a[l]), static_cast<u16>(b[l]), static_cast<u16>(c[l]));
    if (m.pair)
      out |= static_cast<u32>(result_of(m, operation, static_cast<u16>(a[l] >> 16), static_cast<u16>(b[l] >> 16),
                                        static_cast<u16>(c[l] >> 16))) << 16;
    d[l] = out;
  });
}
const Register register_half("arithmetic_any_f16", arithmetic_half);

}  // namespace
}  // namespace vm
