// Integer arithmetic, logic, shifts and bit fields.
#include <algorithm>

#include "machine.h"

namespace vm {
namespace {

template <class T>
T safe_div(T a, T b) {
  // Division by zero gives all ones, as PTX leaves it open and the hardware does; -2^n / -1 wraps.
  if (b == 0) return static_cast<T>(~T(0));
  if constexpr (T(-1) < T(0))
    if (b == T(-1)) return static_cast<T>(T(0) - a);
  return static_cast<T>(a / b);
}

template <class T>
T safe_rem(T a, T b) {
  // PTX leaves it open: as an H200 has it.
  if (b == 0) return T(-1);
  if constexpr (T(-1) < T(0))
    if (b == T(-1)) return 0;
  return static_cast<T>(a % b);
}

u32 permute(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 out = 0;
  for (int n = 0; n < 4; n++) {
    const u32 pick = selector >> 4 * n & 15;
    const u8 byte = static_cast<u8>(bytes >> 8 * (pick & 7));
    out |= static_cast<u32>(pick & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * n;
  }
  return out;
}

template <class U>
U insert_bits(U a, U b, u32 position, u32 length) {
  position &= 255, length &= 255;
  constexpr u32 width = 8 * sizeof(U);
  if (position >= width || length == 0) return b;
  const U ones = length >= width ? ~U(0) : (U(1) << length) - 1;
  const U mask = ones << position;
  return (b & ~mask) | (a << position & mask);
}

template <class T, class U>
T extract_bits(T a, u32 position, u32 length) {
  position &= 255, length &= 255;
  constexpr u32 width = 8 * sizeof(U);
  constexpr bool is_signed = T(-1) < T(0);
  if (length == 0) return 0;
  const u32 sign_at = std::min(position + length - 1, width - 1);
  const bool fill = is_signed && (static_cast<U>(a) >> sign_at & 1);
  U out = position >= width ? (fill ? ~U(0) : U(0)) : static_cast<U>(a) >> position;
  if (length < width) {
    const U ones = (U(1) << length) - 1;
    out &= ones;
    // Bits that lie above the source are copies of its sign.
    if (fill) {
      const u32 have = position >= width ? 0 : std::min(length, width - position);
      out |= have >= width ? U(0) : ~((U(1) << have) - 1);
    }
  } else if (fill && position > 0 && position < width) {
    out |= ~(~U(0) >> position);
  }
  return static_cast<T>(out);
}

u32 reverse(u32 a) {
  u32 out = 0;
  for (int n = 0; n < 32; n++) out |= (a >> n & 1) << (31 - n);
  return out;
}

template <class T, class U>
u32 find_top(T a) {
  U bits = static_cast<U>(a);
  if (T(-1) < T(0) && a < 0) bits = static_cast<U>(~bits);
  if (bits == 0) return kFullMask;
  return sizeof(U) == 8 ? 63 - __builtin_clzll(bits) : 31 - __builtin_clz(static_cast<u32>(bits));
}

template <class T, class U>
u32 shift_amount(T a) {
  const u32 top = find_top<T, U>(a);
  return top == kFullMask ? top : 8 * sizeof(U) - 1 - top;
}

// The position of the n-th bit set from `base` on, to the left where n > 0, to the right where n < 0.
u32 find_nth_set(u32 bits, u32 base, i32 n) {
  if (base > 31) return kFullMask;
  if (n == 0) return bits >> base & 1 ? base : kFullMask;
  const int step = n > 0 ? 1 : -1;
  i64 left = n > 0 ? n : -static_cast<i64>(n);
  for (int at = static_cast<int>(base); at >= 0 && at < 32; at += step)
    if ((bits >> at & 1) && --left == 0) return static_cast<u32>(at);
  return kFullMask;
}

u32 low_bits(u32 count) { return count >= 32 ? kFullMask : (1u << count) - 1; }

// `count` ones from bit `start` on.
u32 mask_of(u32 start, u32 count) { return start >= 32 ? 0 : low_bits(count) << start; }

u32 extend_sign(u32 a, u32 count) {
  if (count == 0) return 0;
  const u32 low = a & low_bits(count);
  return low >> (count - 1) & 1 ? low | ~low_bits(count) : low;
}

i64 signed_24(u32 a) { return static_cast<i32>(a << 8) >> 8; }
i32 clamp_32(i64 a) { return static_cast<i32>(a < INT32_MIN ? INT32_MIN : a > INT32_MAX ? INT32_MAX : a); }

template <class T>
T distance(T a, T b) {
  return static_cast<T>(a < b ? b - a : a - b);
}

// Bytes of `a` times halves or bytes of `b`; the types give the signs.
template <class A, class B>
u32 dot4(u32 a, u32 b, u32 c) {
  i64 sum = 0;
  for (int n = 0; n < 4; n++) sum += static_cast<i64>(static_cast<A>(a >> 8 * n)) * static_cast<B>(b >> 8 * n);
  return c + static_cast<u32>(sum);
}
template <class A, class B>
u32 dot2(u32 a, u32 b, u32 c, int first_byte) {
  i64 sum = 0;
  for (int n = 0; n < 2; n++)
    sum += static_cast<i64>(static_cast<A>(a >> 16 * n)) * static_cast<B>(b >> 8 * (n + first_byte));
  return c + static_cast<u32>(sum);
}

}  // namespace

#define VM_INT(BITS, U, I)                                                                  \
  VM_BINARY(add_b##BITS, U, U, U, a + b)                                                    \
  VM_BINARY(sub_b##BITS, U, U, U, a - b)                                                    \
  VM_BINARY(mul_lo_b##BITS, U, U, U, static_cast<u64>(a) * b)                               \
  VM_TERNARY(mad_lo_b##BITS, U, U, U, U, static_cast<u64>(a) * b + c)                       \
  VM_BINARY(div_u##BITS, U, U, U, safe_div(a, b))                                           \
  VM_BINARY(div_s##BITS, I, I, I, safe_div(a, b))                                           \
  VM_BINARY(rem_u##BITS, U, U, U, safe_rem(a, b))                                           \
  VM_BINARY(rem_s##BITS, I, I, I, safe_rem(a, b))                                           \
  VM_BINARY(min_u##BITS, U, U, U, a < b ? a : b)                                            \
  VM_BINARY(min_s##BITS, I, I, I, a < b ? a : b)                                            \
  VM_BINARY(max_u##BITS, U, U, U, a > b ? a : b)                                            \
  VM_BINARY(max_s##BITS, I, I, I, a > b ? a : b)                                            \
  VM_UNARY(abs_s##BITS, U, I, a < 0 ? static_cast<U>(U(0) - static_cast<U>(a)) : static_cast<U>(a)) \
  VM_UNARY(neg_s##BITS, U, U, U(0) - a)                                                     \
  VM_UNARY(not_b##BITS, U, U, ~a)                                                           \
  VM_BINARY(and_b##BITS, U, U, U, a & b)                                                    \
  VM_BINARY(or_b##BITS, U, U, U, a | b)                                                     \
  VM_BINARY(xor_b##BITS, U, U, U, a ^ b)                                                    \
  VM_BINARY(shl_b##BITS, U, U, u32, b >= BITS ? U(0) : static_cast<U>(a << b))              \
  VM_BINARY(shr_u##BITS, U, U, u32, b >= BITS ? U(0) : static_cast<U>(a >> b))              \
  VM_BINARY(shr_s##BITS, I, I, u32, a >> (b >= BITS ? BITS - 1 : b))                        \
  VM_TERNARY(sad_u##BITS, U, U, U, U, c + distance<U>(a, b))                                \
  VM_TERNARY(sad_s##BITS, U, I, I, U, c + (a < b ? static_cast<U>(b) - static_cast<U>(a)   \
                                                 : static_cast<U>(a) - static_cast<U>(b)))  \
  VM_UNARY(mov_b##BITS, U, U, a)
VM_INT(16, u16, i16)
VM_INT(32, u32, i32)
VM_INT(64, u64, i64)

VM_BINARY(mul_hi_u16, u16, u16, u16, static_cast<u32>(a) * b >> 16)
VM_BINARY(mul_hi_s16, i16, i16, i16, static_cast<i32>(a) * b >> 16)
VM_BINARY(mul_hi_u32, u32, u32, u32, static_cast<u64>(a) * b >> 32)
VM_BINARY(mul_hi_s32, i32, i32, i32, static_cast<i64>(a) * b >> 32)
VM_BINARY(mul_hi_u64, u64, u64, u64, static_cast<unsigned __int128>(a) * b >> 64)
VM_BINARY(mul_hi_s64, i64, i64, i64, static_cast<__int128>(a) * b >> 64)
VM_TERNARY(mad_hi_u32, u32, u32, u32, u32, (static_cast<u64>(a) * b >> 32) + c)
VM_TERNARY(mad_hi_s32, i32, i32, i32, i32, (static_cast<i64>(a) * b >> 32) + c)
VM_BINARY(mul_wide_u16, u32, u16, u16, static_cast<u32>(a) * b)
VM_BINARY(mul_wide_s16, i32, i16, i16, static_cast<i32>(a) * b)
VM_BINARY(mul_wide_u32, u64, u32, u32, static_cast<u64>(a) * b)
VM_BINARY(mul_wide_s32, i64, i32, i32, static_cast<i64>(a) * b)
VM_TERNARY(mad_wide_u16, u32, u16, u16, u32, static_cast<u32>(a) * b + c)
VM_TERNARY(mad_wide_s16, i32, i16, i16, i32, static_cast<i32>(a) * b + c)
VM_TERNARY(mad_wide_u32, u64, u32, u32, u64, static_cast<u64>(a) * b + c)
VM_TERNARY(mad_wide_s32, i64, i32, i32, i64, static_cast<i64>(a) * b + c)

VM_UNARY(popc_b32, u32, u32, __builtin_popcount(a))
VM_UNARY(popc_b64, u32, u64, __builtin_popcountll(a))
VM_UNARY(clz_b32, u32, u32, a ? __builtin_clz(a) : 32)
VM_UNARY(clz_b64, u32, u64, a ? __builtin_clzll(a) : 64)
VM_UNARY(brev_b32, u32, u32, reverse(a))
VM_UNARY(brev_b64, u64, u64, static_cast<u64>(reverse(static_cast<u32>(a))) << 32 | reverse(static_cast<u32>(a >> 32)))
VM_UNARY(bfind_u32, u32, u32, (find_top<u32, u32>(a)))
VM_UNARY(bfind_s32, u32, i32, (find_top<i32, u32>(a)))
VM_UNARY(bfind_u64, u32, u64, (find_top<u64, u64>(a)))
VM_UNARY(bfind_s64, u32, i64, (find_top<i64, u64>(a)))
VM_UNARY(bfind_shift_u32, u32, u32, (shift_amount<u32, u32>(a)))
VM_UNARY(bfind_shift_s32, u32, i32, (shift_amount<i32, u32>(a)))
VM_UNARY(bfind_shift_u64, u32, u64, (shift_amount<u64, u64>(a)))
VM_UNARY(bfind_shift_s64, u32, i64, (shift_amount<i64, u64>(a)))
VM_TERNARY(fns_b32, u32, u32, u32, i32, find_nth_set(a, b, c))
VM_BINARY(bmsk_clamp, u32, u32, u32, mask_of(a, b))
VM_BINARY(bmsk_wrap, u32, u32, u32, mask_of(a & 31, b & 31))
VM_BINARY(szext_clamp_u32, u32, u32, u32, b >= 32 ? a : a & low_bits(b))
VM_BINARY(szext_wrap_u32, u32, u32, u32, a & low_bits(b & 31))
VM_BINARY(szext_clamp_s32, u32, u32, u32, b >= 32 ? a : extend_sign(a, b))
VM_BINARY(szext_wrap_s32, u32, u32, u32, extend_sign(a, b & 31))
VM_UNARY(not_logical_b16, u16, u16, a == 0)
VM_UNARY(not_logical_b32, u32, u32, a == 0)
VM_UNARY(not_logical_b64, u64, u64, a == 0)
VM_BINARY(mul_24_lo_u32, u32, u32, u32, static_cast<u64>(a & 0xffffff) * (b & 0xffffff))
VM_BINARY(mul_24_hi_u32, u32, u32, u32, static_cast<u64>(a & 0xffffff) * (b & 0xffffff) >> 16)
VM_BINARY(mul_24_lo_s32, u32, u32, u32, signed_24(a) * signed_24(b))
VM_BINARY(mul_24_hi_s32, u32, u32, u32, signed_24(a) * signed_24(b) >> 16)
VM_BINARY(add_sat_s32, i32, i32, i32, clamp_32(static_cast<i64>(a) + b))
VM_BINARY(sub_sat_s32, i32, i32, i32, clamp_32(static_cast<i64>(a) - b))
VM_TERNARY(mad_hi_sat_s32, i32, i32, i32, i32, clamp_32((static_cast<i64>(a) * b >> 32) + c))
VM_BINARY(min_relu_s32, i32, i32, i32, std::max(std::min(a, b), 0))
VM_BINARY(max_relu_s32, i32, i32, i32, std::max(std::max(a, b), 0))
VM_TERNARY(prmt_b32, u32, u32, u32, u32, permute(a, b, c))
VM_TERNARY(shf_l_wrap, u32, u32, u32, u32, (static_cast<u64>(b) << 32 | a) << (c & 31) >> 32)
VM_TERNARY(shf_r_wrap, u32, u32, u32, u32, (static_cast<u64>(b) << 32 | a) >> (c & 31))
VM_TERNARY(shf_l_clamp, u32, u32, u32, u32, c >= 32 ? a : (static_cast<u64>(b) << 32 | a) << c >> 32)
VM_TERNARY(shf_r_clamp, u32, u32, u32, u32, c >= 32 ? b : (static_cast<u64>(b) << 32 | a) >> c)
VM_TERNARY(bfe_u32, u32, u32, u32, u32, (extract_bits<u32, u32>(a, b, c)))
VM_TERNARY(bfe_s32, i32, i32, u32, u32, (extract_bits<i32, u32>(a, b, c)))
VM_TERNARY(bfe_u64, u64, u64, u32, u32, (extract_bits<u64, u64>(a, b, c)))
VM_TERNARY(bfe_s64, i64, i64, u32, u32, (extract_bits<i64, u64>(a, b, c)))
VM_TERNARY(dp4a_u32_u32, u32, u32, u32, u32, (dot4<u8, u8>(a, b, c)))
VM_TERNARY(dp4a_s32_s32, u32, u32, u32, u32, (dot4<i8, i8>(a, b, c)))
VM_TERNARY(dp4a_u32_s32, u32, u32, u32, u32, (dot4<u8, i8>(a, b, c)))
VM_TERNARY(dp4a_s32_u32, u32, u32, u32, u32, (dot4<i8, u8>(a, b, c)))
#define VM_DP2A(A, TA, B, TB)                                                             \
  VM_TERNARY(dp2a_lo_##A##_##B, u32, u32, u32, u32, (dot2<TA, TB>(a, b, c, 0)))           \
  VM_TERNARY(dp2a_hi_##A##_##B, u32, u32, u32, u32, (dot2<TA, TB>(a, b, c, 2)))
VM_DP2A(u32, u16, u32, u8)
VM_DP2A(u32, u16, s32, i8)
VM_DP2A(s32, i16, u32, u8)
VM_DP2A(s32, i16, s32, i8)

VM_TERNARY(mad_hi_u16, u16, u16, u16, u16, (static_cast<u32>(a) * b >> 16) + c)
VM_TERNARY(mad_hi_s16, i16, i16, i16, i16, (static_cast<i32>(a) * b >> 16) + c)
VM_TERNARY(mad_hi_u64, u64, u64, u64, u64, (static_cast<unsigned __int128>(a) * b >> 64) + c)
VM_TERNARY(mad_hi_s64, i64, i64, i64, i64, static_cast<u64>(static_cast<__int128>(a) * b >> 64) + static_cast<u64>(c))

// Modes of prmt that take the bytes from a pair by one number.
static u32 window_of(i32 mode, u32 a, u32 b, u32 c) {
  const u32 n = c & 3, byte = a >> 8 * n & 0xff;
  const u64 pair = static_cast<u64>(b) << 32 | a;
  u32 out = 0;
  switch (mode) {
    case 0: return static_cast<u32>(pair >> 8 * n);  // f4e
    case 1:                                          // b4e
      for (u32 k = 0; k < 4; k++) out |= static_cast<u32>(pair >> 8 * ((8 + n - k) & 7) & 0xff) << 8 * k;
      return out;
    case 2: return byte * 0x01010101u;  // rc8
    case 3:                             // ecl: byte k at or above n, else byte n
      for (u32 k = 0; k < 4; k++) out |= (a >> 8 * std::max(k, n) & 0xff) << 8 * k;
      return out;
    case 4:  // ecr
      for (u32 k = 0; k < 4; k++) out |= (a >> 8 * std::min(k, n) & 0xff) << 8 * k;
      return out;
    default: return (c & 1 ? a >> 16 : a & 0xffff) * 0x00010001u;  // rc16
  }
}
static void prmt_mode(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32* d = w.row(x[0]);
  const u32 *a = w.row(x[1]), *b = w.row(x[2]), *c = w.row(x[3]);
  each_lane(mask, [&](int l) { d[l] = window_of(i.imm, a[l], b[l], c[l]); });
}
static const Register register_prmt_mode("prmt_mode", prmt_mode);

// Sums that take a carry and leave one: d, carry out, a, b, carry in. A borrow counts as a carry.
template <class T>
static void add_carry(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32 *a = w.row(x[2]), *b = w.row(x[3]), in = w.predicate(x[4]);
  u32 out = 0;
  each_lane(mask, [&](int l) {
    const T p = get<T>(a, l), q = get<T>(b, l), carry = in >> l & 1;
    const auto wide = static_cast<unsigned __int128>(p) + q + carry;
    const auto less = static_cast<unsigned __int128>(q) + carry;
    const bool over = i.imm == 0 ? (wide >> 8 * sizeof(T)) != 0 : less > p;
    out |= static_cast<u32>(over) << l;
    put<T>(w.row(x[0]), l, static_cast<T>(i.imm == 0 ? p + q + carry : p - q - carry));
  });
  w.set_predicate(x[1], mask, out);
}
// d, carry out, a, b, c, carry in; imm: 0 low half of the product, 1 high half, 2 high half of signed ones.
template <class T, class I>
static void mad_carry(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32 *a = w.row(x[2]), *b = w.row(x[3]), *c = w.row(x[4]), in = w.predicate(x[5]);
  constexpr int kBits = 8 * sizeof(T);
  u32 out = 0;
  each_lane(mask, [&](int l) {
    const T p = get<T>(a, l), q = get<T>(b, l), r = get<T>(c, l);
    T product = static_cast<T>(static_cast<unsigned __int128>(p) * q);
    if (i.imm == 1) product = static_cast<T>(static_cast<unsigned __int128>(p) * q >> kBits);
    if (i.imm == 2) product = static_cast<T>(static_cast<__int128>(static_cast<I>(p)) * static_cast<I>(q) >> kBits);
    const auto wide = static_cast<unsigned __int128>(product) + r + (in >> l & 1);
    out |= static_cast<u32>((wide >> kBits) != 0) << l;
    put<T>(w.row(x[0]), l, static_cast<T>(wide));
  });
  w.set_predicate(x[1], mask, out);
}
static const Register carries[] = {{"add_carry_b32", add_carry<u32>},
                                   {"add_carry_b64", add_carry<u64>},
                                   {"mad_carry_b32", mad_carry<u32, i32>},
                                   {"mad_carry_b64", mad_carry<u64, i64>}};

// Differences of four bytes; imm 1: their sum and c.
static void vabsdiff4(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32* d = w.row(x[0]);
  const u32 *a = w.row(x[1]), *b = w.row(x[2]), *c = w.row(x[3]);
  each_lane(mask, [&](int l) {
    u32 bytes = 0, sum = c[l];
    for (int n = 0; n < 4; n++) {
      const u32 apart = distance<u32>(a[l] >> 8 * n & 0xff, b[l] >> 8 * n & 0xff);
      bytes |= apart << 8 * n, sum += apart;
    }
    d[l] = i.imm == 1 ? sum : bytes;
  });
}
static const Register register_vabsdiff4("abs_differences_b8x4", vabsdiff4);

// Two 16-bit integers in a register; imm: 0 add, 1 min, 2 max, 3 sub, 4 neg; flags: 1 signed, 2 relu.
static u16 half_of_pair(const Ins& i, u16 a, u16 b) {
  const bool less = i.flags & 1 ? static_cast<i16>(a) < static_cast<i16>(b) : a < b;
  u16 out = 0;
  switch (i.imm) {
    case 0: out = static_cast<u16>(a + b); break;
    case 1: out = less ? a : b; break;
    case 2: out = less ? b : a; break;
    case 3: out = static_cast<u16>(a - b); break;
    case 4: out = static_cast<u16>(0 - a); break;
  }
  return (i.flags & 2) && static_cast<i16>(out) < 0 ? 0 : out;
}
static void pair_b16x2(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32* d = w.row(x[0]);
  const u32 *a = w.row(x[1]), *b = w.row(x[2]);
  each_lane(mask, [&](int l) {
    d[l] = static_cast<u32>(half_of_pair(i, static_cast<u16>(a[l] >> 16), static_cast<u16>(b[l] >> 16))) << 16 |
           half_of_pair(i, static_cast<u16>(a[l]), static_cast<u16>(b[l]));
  });
}
static const Register register_pair("add_any_b16x2", pair_b16x2);

#define VM_BFI(BITS, U)                                                          \
  static void bfi_b##BITS(Warp& w, const Ins& i, u32 mask) {                     \
    VM_OPERANDS;                                                                 \
    u32* d = w.row(x[0]);                                                        \
    const u32 *a = w.row(x[1]), *b = w.row(x[2]), *c = w.row(x[3]), *e = w.row(x[4]); \
    each_lane(mask, [=](int l) { put<U>(d, l, insert_bits<U>(get<U>(a, l), get<U>(b, l), c[l], e[l])); }); \
  }                                                                              \
  static const Register register_bfi_b##BITS("bfi_b" #BITS, bfi_b##BITS);
VM_BFI(32, u32)
VM_BFI(64, u64)

// Any function of three bits; imm is its truth table.
static void lop3_b32(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32* d = w.row(x[0]);
  const u32 *ra = w.row(x[1]), *rb = w.row(x[2]), *rc = w.row(x[3]);
  const u32 table = static_cast<u32>(i.imm);
  u32 choose[8];
  for (int n = 0; n < 8; n++) choose[n] = table >> n & 1 ? kFullMask : 0;
  each_lane(mask, [=](int l) {
    const u32 a = ra[l], b = rb[l], c = rc[l];
    d[l] = (choose[0] & ~a & ~b & ~c) | (choose[1] & ~a & ~b & c) | (choose[2] & ~a & b & ~c) |
           (choose[3] & ~a & b & c) | (choose[4] & a & ~b & ~c) | (choose[5] & a & ~b & c) | (choose[6] & a & b & ~c)
               | (choose[7] & a & b & c);
  });
}
static const Register register_lop3("lop3_b32", lop3_b32);

// p = (d != 0) combined with q. Operands: p, d, q; imm: 0 or, 1 and.
static void lop3_test(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32 *d = w.row(x[1]), q = w.predicate(x[2]);
  u32 bits = 0;
  for (int l = 0; l < kLanes; l++) bits |= static_cast<u32>(d[l] != 0) << l;
  w.set_predicate(x[0], mask, i.imm == 0 ? bits | q : bits & q);
}
static const Register register_lop3_test("lop3_test", lop3_test);

// Vectors of narrow registers <-> one wide register; imm is the width of an element in bits, flags how many there are.
static void pack(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32* d = w.row(x[0]);
  const u32 width = static_cast<u32>(i.imm), words = (width * i.flags + 31) / 32;
  const u32 ones = width >= 32 ? kFullMask : (1u << width) - 1;
  each_lane(mask, [&](int l) {
    u32 out[4] = {};
    for (u32 n = 0; n < i.flags; n++) {
      const u32 at = width * n;
      out[at / 32] |= (w.row(x[1 + n])[l] & ones) << at % 32;
      if (width == 64) out[at / 32 + 1] = w.row(x[1 + n])[l + kLanes];
    }
    for (u32 n = 0; n < words; n++) d[l + n * kLanes] = out[n];
  });
}
static const Register register_pack("pack", pack);

static void unpack(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32* a = w.row(x[i.flags]);
  const u32 width = static_cast<u32>(i.imm), words = (width * i.flags + 31) / 32;
  if (width == 16 && i.flags == 2) {
    // The frequent one. A result may lie in the row of the source.
    u32 pair[kLanes];
    std::memcpy(pair, a, sizeof pair);
    u32 *low = w.row(x[0]), *high = w.row(x[1]);
    each_lane(mask, [&](int l) { low[l] = pair[l] & 0xffff; });
    each_lane(mask, [&](int l) { high[l] = pair[l] >> 16; });
    return;
  }
  const u32 ones = width >= 32 ? kFullMask : (1u << width) - 1;
  each_lane(mask, [&](int l) {
    u32 bits[4] = {};
    for (u32 n = 0; n < words; n++) bits[n] = a[l + n * kLanes];
    for (u32 n = 0; n < i.flags; n++) {
      const u32 at = width * n;
      u32* d = w.row(x[n]);
      d[l] = bits[at / 32] >> at % 32 & ones;
      // The sink has two rows.
      if (width == 64) d[l + kLanes] = bits[at / 32 + 1];
    }
  });
}
static const Register register_unpack("unpack", unpack);

static void mov_b128(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  for (int n = 0; n < 4; n++) {
    u32* d = w.row(x[0]) + n * kLanes;
    const u32* a = w.row(x[1]) + n * kLanes;
    each_lane(mask, [=](int l) { d[l] = a[l]; });
  }
}
static const Register register_mov_b128("mov_b128", mov_b128);

}  // namespace vm
