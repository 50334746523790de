// Comparisons, selections and predicate logic.
#include <cmath>

#include "numerics.h"

namespace vm {
namespace {

// Operands: p, q (its complement), a, b, and with a boolean operator (flags 1 and, 2 or, 3 xor) a predicate.
template <class T, class F>
inline __attribute__((always_inline)) void set_predicates(Warp& w, const Ins& i, u32 mask, F compare) {
  VM_OPERANDS;
  const u32 *a = w.row(x[2]), *b = w.row(x[3]);
  u32 bits = 0;
#pragma GCC ivdep
  for (int l = 0; l < kLanes; l++) bits |= static_cast<u32>(compare(get<T>(a, l), get<T>(b, l))) << l;
  u32 inverse = ~bits;
  if (i.flags != 0) {
    const u32 c = w.predicate(x[4]);
    bits = i.flags == 1 ? bits & c : i.flags == 2 ? bits | c : bits ^ c;
    inverse = i.flags == 1 ? inverse & c : i.flags == 2 ? inverse | c : inverse ^ c;
  }
  w.set_predicate(x[1], mask, inverse);
  w.set_predicate(x[0], mask, bits);
}

template <class T>
bool unordered(T a, T b) {
  return a != a || b != b;
}

}  // namespace

#define VM_SETP(TYPE, T, CMP, EXPR)                                                    \
  static void setp_##CMP##_##TYPE(Warp& w, const Ins& i, u32 mask) {                   \
    set_predicates<T>(w, i, mask, [](T a, T b) -> bool { return EXPR; });              \
  }                                                                                    \
  static const Register register_setp_##CMP##_##TYPE("setp_" #CMP "_" #TYPE, setp_##CMP##_##TYPE);
#define VM_SETP_ALL(TYPE, T)      \
  VM_SETP(TYPE, T, eq, a == b)    \
  VM_SETP(TYPE, T, lt, a < b)     \
  VM_SETP(TYPE, T, le, a <= b)    \
  VM_SETP(TYPE, T, gt, a > b)     \
  VM_SETP(TYPE, T, ge, a >= b)
#define VM_SETP_INT(TYPE, T) VM_SETP_ALL(TYPE, T) VM_SETP(TYPE, T, ne, a != b)
#define VM_SETP_FLOAT(TYPE, T)                                                          \
  VM_SETP_ALL(TYPE, T)                                                                  \
  VM_SETP(TYPE, T, ne, a < b || a > b)                                                  \
  VM_SETP(TYPE, T, equ, !(a < b || a > b))                                              \
  VM_SETP(TYPE, T, neu, a != b)                                                         \
  VM_SETP(TYPE, T, ltu, !(a >= b))                                                      \
  VM_SETP(TYPE, T, leu, !(a > b))                                                       \
  VM_SETP(TYPE, T, gtu, !(a <= b))                                                      \
  VM_SETP(TYPE, T, geu, !(a < b))                                                       \
  VM_SETP(TYPE, T, num, !unordered(a, b))                                               \
  VM_SETP(TYPE, T, nan, unordered(a, b))
VM_SETP_INT(u16, u16)
VM_SETP_INT(s16, i16)
VM_SETP_INT(u32, u32)
VM_SETP_INT(s32, i32)
VM_SETP_INT(u64, u64)
VM_SETP_INT(s64, i64)
VM_SETP_FLOAT(f32, float)
VM_SETP_FLOAT(f64, double)

// ---- f16 and bf16, and f32 with subnormals flushed: the comparison by number ----
namespace {

// In the order that Python has them.
enum Comparison { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

bool holds(Comparison comparison, float a, float b) {
  switch (comparison) {
    case kEq: return a == b;
    case kNe: return a < b || a > b;
    case kLt: return a < b;
    case kLe: return a <= b;
    case kGt: return a > b;
    case kGe: return a >= b;
    case kEqu: return !(a < b || a > b);
    case kNeu: return a != b;
    case kLtu: return !(a >= b);
    case kLeu: return !(a > b);
    case kGtu: return !(a <= b);
    case kGeu: return !(a < b);
    case kNum: return !unordered(a, b);
    case kNan: return unordered(a, b);
  }
  return false;
}

u32 combined(u32 flags, u32 bits, u32 c) {
  switch (flags & 3) {
    case 1: return bits & c;
    case 2: return bits | c;
    case 3: return bits ^ c;
    default: return bits;
  }
}

// flags: bits 0-1 boolean operator, 2-3 type (0 f16, 1 bf16, 2 f32), 4 flush, 5 the upper half of a pair.
float operand_of(u32 flags, u32 bits) {
  const u16 half = static_cast<u16>(flags >> 5 & 1 ? bits >> 16 : bits);
  const u32 type = flags >> 2 & 3;
  const float value = type == 0 ? half_value(half) : type == 1 ? bf16_value(half) : bits_as<float>(bits);
  const float least = type == 0 ? 0x1p-14f : 0x1p-126f;
  return (flags >> 4 & 1) && std::fabs(value) < least ? std::copysign(0.0f, value) : value;
}

// Operands: p, q (its complement), a, b, a predicate; imm is the comparison.
void setp_any(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32 *a = w.row(x[2]), *b = w.row(x[3]), c = w.predicate(x[4]);
  u32 bits = 0;
  for (int l = 0; l < kLanes; l++) {
    const bool is = holds(static_cast<Comparison>(i.imm), operand_of(i.flags, a[l]), operand_of(i.flags, b[l]));
    bits |= static_cast<u32>(is) << l;
  }
  w.set_predicate(x[1], mask, combined(i.flags, ~bits, c));
  w.set_predicate(x[0], mask, combined(i.flags, bits, c));
}
const Register register_setp_any("setp_any", setp_any);

}  // namespace

#define VM_SELP(BITS, U)                                                                \
  static void selp_b##BITS(Warp& w, const Ins& i, u32 mask) {                           \
    VM_OPERANDS;                                                                        \
    u32* d = w.row(x[0]);                                                               \
    const u32 *a = w.row(x[1]), *b = w.row(x[2]);                                       \
    const u32 p = w.predicate(x[3]);                                                    \
    each_lane(mask, [=](int l) { put<U>(d, l, p >> l & 1 ? get<U>(a, l) : get<U>(b, l)); }); \
  }                                                                                     \
  static const Register register_selp_b##BITS("selp_b" #BITS, selp_b##BITS);
VM_SELP(16, u16)
VM_SELP(32, u32)
VM_SELP(64, u64)

#define VM_LOGIC(NAME, EXPR)                                                            \
  static void pred_##NAME(Warp& w, const Ins& i, u32 mask) {                            \
    VM_OPERANDS;                                                                        \
    const u32 a = w.predicate(x[1]);                                                    \
    [[maybe_unused]] const u32 b = w.predicate(x[2]);                                   \
    w.set_predicate(x[0], mask, EXPR);                                                  \
  }                                                                                     \
  static const Register register_pred_##NAME(#NAME "_pred", pred_##NAME);
VM_LOGIC(and, a & b)
VM_LOGIC(or, a | b)
VM_LOGIC(xor, a ^ b)

static void mov_pred(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  w.set_predicate(x[0], mask, w.predicate(x[1]));
}
static const Register register_mov_pred("mov_pred", mov_pred);

static void not_pred(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  w.set_predicate(x[0], mask, ~w.predicate(x[1]));
}
static const Register register_not_pred("not_pred", not_pred);

}  // namespace vm
