// Comparisons, selections and predicate logic.
#include <cmath>

#include "machine.h"

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
