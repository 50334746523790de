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
  if (b == 0) return a;
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
VM_UNARY(bfind_shift_u32, u32, u32, a ? 31 - find_top<u32, u32>(a) : kFullMask)
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
    d[l] = (choose[0] & ~a & ~b & ~c) | (choose[1] & ~a & ~b & c) | (choose[2] & ~a & b & ~c) | (choose[3] & ~a & b & c) |
           (choose[4] & a & ~b & ~c) | (choose[5] & a & ~b & c) | (choose[6] & a & b & ~c) | (choose[7] & a & b & c);
  });
}
static const Register register_lop3("lop3_b32", lop3_b32);

// Vectors of narrow registers <-> one wide register; imm is the width of an element in bits, flags how many there are.
static void pack(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32* d = w.row(x[0]);
  const u64 ones = i.imm == 32 ? 0xffffffffull : (1ull << i.imm) - 1;
  each_lane(mask, [&](int l) {
    u64 bits = 0;
    for (u32 n = 0; n < i.flags; n++) bits |= (w.row(x[1 + n])[l] & ones) << i.imm * n;
    d[l] = static_cast<u32>(bits);
    if (i.imm * i.flags == 64) d[l + kLanes] = static_cast<u32>(bits >> 32);
  });
}
static const Register register_pack("pack", pack);

static void unpack(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32* a = w.row(x[i.flags]);
  const bool wide = i.imm * i.flags == 64;
  const u64 ones = i.imm == 32 ? 0xffffffffull : (1ull << i.imm) - 1;
  each_lane(mask, [&](int l) {
    const u64 bits = a[l] | (wide ? static_cast<u64>(a[l + kLanes]) << 32 : 0);
    for (u32 n = 0; n < i.flags; n++) w.row(x[n])[l] = static_cast<u32>(bits >> i.imm * n & ones);
  });
}
static const Register register_unpack("unpack", unpack);

}  // namespace vm
