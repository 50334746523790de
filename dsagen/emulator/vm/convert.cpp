// cvt: between integer widths, floats and narrow floats.
#include <cmath>
#include <limits>

#include "numerics.h"

namespace vm {

Values::Values(Kind kind) {
  for (u32 code = 0; code < 256; code++) {
    switch (kind) {
      case kE4M3: of[code] = e4m3_value(code); break;
      case kE5M2: of[code] = e5m2_value(code); break;
      case kUE8M0: of[code] = ue8m0_value(code); break;
      default: of[code] = decode(kFormats[kind], code);
    }
  }
}

const float* values_of(Kind kind) {
  static const Values tables[] = {Values(kE4M3), Values(kE5M2), Values(kE2M1),
                                  Values(kE2M3), Values(kE3M2), Values(kUE8M0)};
  return tables[kind - kE4M3].of;
}

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

#define VM_WIDTH(DT, D, ST, S)                                                 \
  VM_UNARY(cvt_##DT##_##ST, decltype(widen(D())), S, widen(static_cast<D>(a))) \
  VM_UNARY(cvt_sat_##DT##_##ST, decltype(widen(D())), S, (widen(clamp_integer<D, S>(a))))
#define VM_WIDTHS(ST, S)  \
  VM_WIDTH(u8, u8, ST, S)   \
  VM_WIDTH(s8, i8, ST, S)   \
  VM_WIDTH(u16, u16, ST, S) \
  VM_WIDTH(s16, i16, ST, S) \
  VM_WIDTH(u32, u32, ST, S) \
  VM_WIDTH(s32, i32, ST, S) \
  VM_WIDTH(u64, u64, ST, S) \
  VM_WIDTH(s64, i64, ST, S)
VM_WIDTHS(u8, u8)
VM_WIDTHS(s8, i8)
VM_WIDTHS(u16, u16)
VM_WIDTHS(s16, i16)
VM_WIDTHS(u32, u32)
VM_WIDTHS(s32, i32)
VM_WIDTHS(u64, u64)
VM_WIDTHS(s64, i64)

#define VM_ROUND(IT, I, FT, F)                                               \
  VM_UNARY(cvt_rni_##IT##_##FT, I, F, (to_integer<I, F>(std::nearbyint(a)))) \
  VM_UNARY(cvt_rzi_##IT##_##FT, I, F, (to_integer<I, F>(std::trunc(a))))     \
  VM_UNARY(cvt_rmi_##IT##_##FT, I, F, (to_integer<I, F>(std::floor(a))))     \
  VM_UNARY(cvt_rpi_##IT##_##FT, I, F, (to_integer<I, F>(std::ceil(a))))      \
  VM_UNARY(cvt_rn_##FT##_##IT, F, I, static_cast<F>(a))
#define VM_ROUNDS(FT, F)     \
  VM_ROUND(u16, u16, FT, F)  \
  VM_ROUND(s16, i16, FT, F)  \
  VM_ROUND(u32, u32, FT, F)  \
  VM_ROUND(s32, i32, FT, F)  \
  VM_ROUND(u64, u64, FT, F)  \
  VM_ROUND(s64, i64, FT, F)
VM_ROUNDS(f32, float)
VM_ROUNDS(f64, double)
VM_UNARY(cvt_rni_f32_f32, float, float, canonical(std::nearbyint(a)))
VM_UNARY(cvt_rzi_f32_f32, float, float, canonical(std::trunc(a)))
VM_UNARY(cvt_rmi_f32_f32, float, float, canonical(std::floor(a)))
VM_UNARY(cvt_rpi_f32_f32, float, float, canonical(std::ceil(a)))
VM_UNARY(cvt_rni_f64_f64, double, double, std::nearbyint(a))
VM_UNARY(cvt_rzi_f64_f64, double, double, std::trunc(a))
VM_UNARY(cvt_rmi_f64_f64, double, double, std::floor(a))
VM_UNARY(cvt_rpi_f64_f64, double, double, std::ceil(a))
VM_UNARY(cvt_rn_f32_u8, float, u8, a)
VM_UNARY(cvt_rn_f32_s8, float, i8, a)
VM_UNARY(cvt_f64_f32, double, float, a)
VM_UNARY(cvt_rn_f32_f64, float, double, canonical(static_cast<float>(a)))
VM_UNARY(cvt_sat_f32_f32, float, float, saturate(a))

// All lanes at once: of each by itself g++ compares the half with itself, which takes a library's function.
static void op_cvt_f32_f16(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32* a = w.row(x[1]);
  u16 halves[kLanes];
  float values[kLanes];
  for (int l = 0; l < kLanes; l++) halves[l] = static_cast<u16>(a[l]);
  half_values(halves, values, kLanes);
  u32* d = w.row(x[0]);
  each_lane(mask, [&](int l) { put<float>(d, l, canonical(values[l])); });
}
static const Register register_cvt_f32_f16("cvt_f32_f16", op_cvt_f32_f16);
VM_UNARY(cvt_f32_bf16, float, u16, canonical(bf16_value(a)))
VM_UNARY(cvt_rn_f16_f32, u16, float, half_bits(a))
VM_UNARY(cvt_rn_bf16_f32, u16, float, bf16_bits(a))
// Pairs: the first source goes to the upper half.
VM_BINARY(cvt_rn_f16x2_f32, u32, float, float, static_cast<u32>(half_bits(a)) << 16 | half_bits(b))
VM_BINARY(cvt_rn_bf16x2_f32, u32, float, float, static_cast<u32>(bf16_bits(a)) << 16 | bf16_bits(b))

// ---- everything else: slower, by what the flags say ----
namespace {

struct Conversion {
  Kind from, to;
  Rounding rounding;
  bool relu, finite, saturates, flushes, to_whole;
  u32 elements;
  explicit Conversion(u32 flags)
      : from(static_cast<Kind>(flags & 31)), to(static_cast<Kind>(flags >> 5 & 31)),
        rounding(static_cast<Rounding>(flags >> 10 & 7)), relu(flags >> 13 & 1), finite(flags >> 14 & 1),
        saturates(flags >> 15 & 1), flushes(flags >> 16 & 1), to_whole(flags >> 17 & 1), elements(flags >> 18 & 7) {}
};

// Bits of an element in its register.
u32 width_of(Kind kind) {
  switch (kind) {
    case kF64: case kU64: case kS64: return 64;
    case kF32: case kTF32: case kU32: case kS32: return 32;
    case kF16: case kBF16: case kU16: case kS16: return 16;
    case kE2M1: return 4;
    default: return 8;
  }
}

bool is_integer(Kind kind) { return kind >= kU8; }

// A 64-bit magnitude as a double whose last bit is set where bits were lost, so that a later rounding is right.
double sticky(u64 magnitude) {
  const int excess = magnitude == 0 ? 0 : 11 - __builtin_clzll(magnitude);
  if (excess <= 0) return static_cast<double>(magnitude);
  const u64 kept = magnitude >> excess | ((magnitude & ((1ull << excess) - 1)) != 0);
  return std::ldexp(static_cast<double>(kept), excess);
}

// A 64-bit magnitude as a double that is rounded another way than to the nearest.
double directed(u64 magnitude, bool negative, Rounding rounding) {
  const int excess = magnitude == 0 ? 0 : 11 - __builtin_clzll(magnitude);
  const double sign = negative ? -1 : 1;
  if (excess <= 0) return sign * static_cast<double>(magnitude);
  const bool away = (magnitude & ((1ull << excess) - 1)) != 0 && rounding == (negative ? kDown : kUp);
  return sign * std::ldexp(static_cast<double>((magnitude >> excess) + away), excess);
}

double value_of(Kind kind, u64 bits) {
  switch (kind) {
    case kF16: return half_value(static_cast<u16>(bits));
    case kBF16: return bf16_value(static_cast<u16>(bits));
    case kTF32: case kF32: return bits_as<float>(static_cast<u32>(bits));
    case kF64: return bits_as<double>(bits);
    case kU8: return static_cast<u8>(bits);
    case kS8: return static_cast<i8>(bits);
    case kU16: return static_cast<u16>(bits);
    case kS16: return static_cast<i16>(bits);
    case kU32: return static_cast<u32>(bits);
    case kS32: return static_cast<i32>(bits);
    case kU64: return sticky(bits);
    case kS64: return static_cast<i64>(bits) < 0 ? -sticky(0 - bits) : sticky(bits);
    default: return values_of(kind)[bits & 0xff];
  }
}

double rounded(double x, Rounding rounding) {
  switch (rounding) {
    case kTowardZero: return std::trunc(x);
    case kDown: return std::floor(x);
    case kUp: return std::ceil(x);
    default: return std::nearbyint(x);
  }
}

u64 integer_of(Kind kind, double x) {
  switch (kind) {
    case kU8: return to_integer<u8>(x);
    case kS8: return static_cast<u64>(to_integer<i8>(x));
    case kU16: return to_integer<u16>(x);
    case kS16: return static_cast<u64>(to_integer<i16>(x));
    case kU32: return to_integer<u32>(x);
    case kS32: return static_cast<u64>(to_integer<i32>(x));
    case kU64: return to_integer<u64>(x);
    default: return static_cast<u64>(to_integer<i64>(x));
  }
}

// A power of two: the exponent of the magnitude, in rounding up the next one where there is more.
u32 exponent_code(double x, const Conversion& c) {
  if (x != x) return 0xff;
  const double magnitude = std::fabs(x);
  if (std::isinf(magnitude)) return c.finite ? 0xfe : 0xff;
  if (magnitude <= 0x1p-127) return 0;
  int exponent = std::ilogb(magnitude);
  if (c.rounding == kUp && std::ldexp(1.0, exponent) < magnitude) exponent++;
  const int code = exponent < -127 ? 0 : exponent + 127;
  return code > 0xfe ? (c.finite ? 0xfe : 0xff) : static_cast<u32>(code);
}

// The nearest code of a format without infinity or where it is not wanted, from an fp32: without calls.
u32 nearest_finite(const Format& f, float x, bool relu) {
  if (x != x) return f.nan;
  const u32 bits = bits_as<u32>(x), sign = bits >> 31;
  if (relu && sign) return 0;
  const float magnitude = bits_as<float>(bits & 0x7fffffff);
  const int shift = 23 - f.mantissa_bits;
  u32 code;
  if (magnitude < bits_as<float>(static_cast<u32>(128 - f.bias) << 23)) {
    // Below the smallest normal: adding the power of two whose last place is a step rounds to steps.
    const float step = bits_as<float>(static_cast<u32>(127 + 1 - f.bias - f.mantissa_bits + 23) << 23);
    code = bits_as<u32>(magnitude + step) - bits_as<u32>(step);
  } else {
    const u32 whole = bits_as<u32>(magnitude), rebias = static_cast<u32>(127 - f.bias) << f.mantissa_bits;
    code = ((whole + (1u << (shift - 1)) - 1 + (whole >> shift & 1)) >> shift) - rebias;
  }
  return sign << (f.exponent_bits + f.mantissa_bits) | (code > f.largest ? f.largest : code);
}

u64 converted(const Conversion& c, double x, double random) {
  if (c.flushes && std::fabs(x) < 0x1p-126 && (c.from == kF32 || c.to == kF32)) x = std::copysign(0.0, x);
  if (is_integer(c.to)) return integer_of(c.to, rounded(x, c.rounding));
  if (c.to_whole) x = rounded(x, c.rounding);
  if (c.saturates) x = x > 0 ? (x > 1 ? 1.0 : x) : 0.0;
  if (c.to == kF64) return bits_as<u64>(x);
  if (c.to == kUE8M0) return exponent_code(x, c);
  if (c.to >= kE4M3 && c.rounding == kNearestEven) return nearest_finite(kFormats[c.to], static_cast<float>(x), c.relu);
  const u32 code = encode(kFormats[c.to], x, c.rounding, c.relu, c.finite, random);
  if (c.to == kTF32) return code << 13;
  if (c.to == kF32 && c.flushes && (code & 0x7f800000) == 0) return code & 0x80000000;
  return code;
}

// As ptxas writes it for sm_90, an H200 agreeing: of NaN the upper bits stay, so that it may become infinity.
u32 away_to_tf32(u32 bits, bool finite) {
  const auto is_finite = [](u32 code) { return (code & 0x7fffffff) < 0x7f800000; };
  if (is_finite(bits)) bits += 0x1000;
  bits &= 0xffffe000;
  return finite && !is_finite(bits) ? bits - 0x2000 : bits;
}

u64 whole_to_double(const Conversion& c, u64 bits) {
  const bool negative = c.from == kS64 && static_cast<i64>(bits) < 0;
  return bits_as<u64>(directed(negative ? 0 - bits : bits, negative, c.rounding));
}

// What the random bits add for element `n` of `count`, counted from the upper half.
double random_part(const Conversion& c, u32 bits, u32 n) {
  const u32 half = c.elements == 4 ? (n < 2 ? bits >> 16 : bits & 0xffff) : (n == 0 ? bits >> 16 : bits & 0xffff);
  if (c.to == kF16) return (half & 0x1fff) / 8192.0;
  if (c.to == kE2M1) return (n < 2 ? half >> 8 : half & 0xff) / 256.0;
  return half / 65536.0;
}

u64 read(const u32* row, int l, u32 width) {
  return row[l] | (width == 64 ? static_cast<u64>(row[l + kLanes]) << 32 : 0);
}

// Destination, then one source, or as many as there are elements (the first goes to the top), then random bits.
void cvt(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const Conversion c(i.flags);
  const bool separate = c.elements > 1 && (c.from == kF32);
  const bool away = c.to == kTF32 && c.rounding == kNearestAway && !c.relu && !c.flushes;
  const u32 from_width = width_of(c.from), to_width = width_of(c.to);
  const u32 sources = separate ? c.elements : 1;
  each_lane(mask, [&](int l) {
    u64 out = 0;
    for (u32 n = 0; n < c.elements; n++) {
      const u32 place = c.elements - 1 - n;
      const u64 bits = separate ? w.row(x[1 + n])[l] : read(w.row(x[1]), l, from_width) >> from_width * place;
      const u64 code = from_width == 4 ? bits & 15 : bits;
      const double random = c.rounding == kStochastic ? random_part(c, w.row(x[1 + sources])[l], n) : 0;
      const u64 result = away ? away_to_tf32(static_cast<u32>(code), c.finite)
                         : c.to == kF64 && (c.from == kU64 || c.from == kS64)
                             ? whole_to_double(c, code)
                             : converted(c, value_of(c.from, code), random);
      out |= c.elements == 1 ? result : (result & ((1ull << to_width) - 1)) << to_width * place;
    }
    u32* d = w.row(x[0]);
    // Narrow integers fill a register of 16 bits.
    d[l] = to_width < 32 && c.elements == 1 ? static_cast<u32>(out & 0xffff) : static_cast<u32>(out);
    if (to_width * c.elements == 64) d[l + kLanes] = static_cast<u32>(out >> 32);
  });
}

// Two 32-bit integers to narrow ones, which go below those of c. Operands: d, a, b, c; imm: bits, flags: signed.
void cvt_pack(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32 *a = w.row(x[1]), *b = w.row(x[2]), *c = w.row(x[3]);
  u32* d = w.row(x[0]);
  const i64 low = i.flags ? -(1ll << (i.imm - 1)) : 0, high = i.flags ? (1ll << (i.imm - 1)) - 1 : (1ll << i.imm) - 1;
  const auto narrow = [=](u32 value) {
    const i64 v = static_cast<i32>(value);
    return static_cast<u32>(v < low ? low : v > high ? high : v) & ((1u << i.imm) - 1);
  };
  each_lane(mask, [=](int l) {
    const u32 pair = narrow(a[l]) << i.imm | narrow(b[l]);
    d[l] = i.imm == 16 ? pair : c[l] << 2 * i.imm | pair;
  });
}

const Register registers[] = {{"cvt_any", cvt}, {"cvt_pack", cvt_pack}};

// e4m3 is what caches hold.
void cvt_f16x2_e4m3x2(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  static const auto* const table = [] {
    auto* out = new u16[256];
    for (u32 code = 0; code < 256; code++) out[code] = half_bits(e4m3_value(code));
    return out;
  }();
  u32* d = w.row(x[0]);
  const u32* a = w.row(x[1]);
  each_lane(mask, [=](int l) { d[l] = static_cast<u32>(table[a[l] >> 8 & 0xff]) << 16 | table[a[l] & 0xff]; });
}
const Register register_e4m3("cvt_rn_f16x2_e4m3x2", cvt_f16x2_e4m3x2);

}  // namespace
}  // namespace vm
