// atom and red.
#include <algorithm>
#include <mutex>

#include "numerics.h"

namespace vm {
namespace {

enum Operation { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };
enum Type { kUnsigned, kSigned, kFloat, kDouble, kHalf, kBrain, kHalfPair, kBrainPair };

// flags: bits 0-2 space, 3-4 log2 of an element's bytes, 5-8 elements, 9 they are one of 128 bits, 10 address is 64
// bits wide, 16-19 operation, 20-23 type.
struct Atomic {
  Space space;
  u32 bytes, count;
  Operation operation;
  Type type;
  explicit Atomic(u32 flags)
      : space(static_cast<Space>(flags & 7)), bytes(flags >> 9 & 1 ? 16 : 1u << (flags >> 3 & 3)),
        count(flags >> 9 & 1 ? 1 : flags >> 5 & 15),
        operation(static_cast<Operation>(flags >> 16 & 15)), type(static_cast<Type>(flags >> 20 & 15)) {}
};

// A half of the least or largest code, by value; NaN loses.
u16 extreme_half(bool is_min, bool brain, u16 a, u16 b) {
  const u16 infinity = brain ? 0x7f80 : 0x7c00;
  if ((a & 0x7fff) > infinity) return (b & 0x7fff) > infinity ? 0x7fff : b;
  if ((b & 0x7fff) > infinity) return a;
  const auto order = [](u16 bits) {
    return bits & 0x8000 ? -static_cast<int>(bits & 0x7fff) - 1 : static_cast<int>(bits);
  };
  return (order(a) < order(b)) == is_min ? a : b;
}

u16 combine_half(const Atomic& a, bool brain, u16 old, u16 b) {
  if (a.operation != kAdd) return extreme_half(a.operation == kMin, brain, old, b);
  return brain ? bf16_bits(bf16_value(old) + bf16_value(b)) : half_bits(half_value(old) + half_value(b));
}

// `flushes`: fp32 sums in global memory lose subnormals.
template <class U>
U combine_float(const Atomic& a, bool flushes, U old, U b) {
  switch (a.type) {
    case kFloat: {
      const float x = bits_as<float>(static_cast<u32>(old)), y = bits_as<float>(static_cast<u32>(b));
      return bits_as<u32>(canonical(flushes ? flush(flush(x) + flush(y)) : x + y));
    }
    case kDouble: {
      const double x = bits_as<double>(static_cast<u64>(old)), y = bits_as<double>(static_cast<u64>(b));
      return static_cast<U>(bits_as<u64>(x + y));
    }
    case kHalf: case kBrain: return combine_half(a, a.type == kBrain, static_cast<u16>(old), static_cast<u16>(b));
    default: {
      const bool brain = a.type == kBrainPair;
      const u32 low = combine_half(a, brain, static_cast<u16>(old), static_cast<u16>(b));
      const u32 words[] = {static_cast<u32>(old), static_cast<u32>(b)};
      const u32 high = combine_half(a, brain, static_cast<u16>(words[0] >> 16), static_cast<u16>(words[1] >> 16));
      return static_cast<U>(high << 16 | low);
    }
  }
}

template <class U, class I>
U combine(const Atomic& a, bool flushes, U old, U b, U c) {
  const bool less = a.type == kSigned ? static_cast<I>(old) < static_cast<I>(b) : old < b;
  switch (a.operation) {
    case kAnd: return old & b;
    case kOr: return old | b;
    case kXor: return old ^ b;
    case kExch: return b;
    case kCas: return old == b ? c : old;
    case kInc: return old >= b ? 0 : static_cast<U>(old + 1);
    case kDec: return old == 0 || old > b ? b : static_cast<U>(old - 1);
    default: break;
  }
  if (a.type >= kFloat) return combine_float<U>(a, flushes, old, b);
  if (a.operation == kAdd) return static_cast<U>(old + b);
  return less == (a.operation == kMin) ? old : b;
}

// Other CTAs may run on other threads.
template <class U, class I>
U update(u8* at, const Atomic& a, bool flushes, U b, U c) {
  U* word = reinterpret_cast<U*>(at);
  U old = __atomic_load_n(word, __ATOMIC_RELAXED), next;
  do {
    next = combine<U, I>(a, flushes, old, b, c);
  } while (!__atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return old;
}

// 128 bits: one at a time in the whole process. Operands: d, b and c of four rows each.
void update_wide(u8* at, const Atomic& a, int l, u32* d, const u32* b, const u32* c) {
  static std::mutex lock;
  const std::lock_guard<std::mutex> guard(lock);
  u32 old[4], next[4], wanted[4];
  std::memcpy(old, at, sizeof old);
  for (int n = 0; n < 4; n++) wanted[n] = b[l + n * kLanes], next[n] = (a.operation == kCas ? c : b)[l + n * kLanes];
  if (a.operation != kCas || std::equal(old, old + 4, wanted)) std::memcpy(at, next, sizeof next);
  for (int n = 0; n < 4; n++) d[l + n * kLanes] = old[n];
}

void update_lane(Warp& w, const Atomic& a, const u16* x, u32 n, int l, u8* at, bool flushes) {
  const u16 *source = x + a.count + 1 + n, *last = source + a.count;
  u32* d = w.row(x[n == 0 ? 0 : n + 1]);
  const u32 *b = w.row(*source), *c = w.row(*last);
  switch (a.bytes) {
    case 2:
      d[l] = update<u16, i16>(at, a, flushes, static_cast<u16>(b[l]), static_cast<u16>(c[l]));
      break;
    case 4: d[l] = update<u32, i32>(at, a, flushes, b[l], c[l]); break;
    case 8: put<u64>(d, l, update<u64, i64>(at, a, flushes, get<u64>(b, l), get<u64>(c, l))); break;
    default: update_wide(at, a, l, d, b, c);
  }
}

// Destination, address, the other destinations, as many b, as many c.
void atom(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const Atomic a(i.flags);
  const u32 bytes = a.bytes * a.count;
  const u64 first = address_of(w, i, x[1], __builtin_ctz(mask));
  bool changes = false;
  for (u32 m = mask; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u64 address = address_of(w, i, x[1], l);
    u8* at = atomic_access(w, i, address, bytes, l);
    const bool shared = a.space == kShared || a.space == kCluster ||
                        (a.space == kGeneric && (address & ~(kWindowBytes - 1)) == kSharedWindow);
    const auto guard = w.cta->order.hold(!shared);
    order_atomic(w, i, address, l);
    u8 before[32];
    std::memcpy(before, at, bytes);
    for (u32 n = 0; n < a.count; n++) update_lane(w, a, x, n, l, at + n * a.bytes, !shared);
    changes |= std::memcmp(before, at, bytes) != 0;
  }
  end_atomic(w, mask, first, changes);
}

const Register registers[] = {{"atom", atom}};

template <class U, class I>
void reduce_one(u8* at, const Atomic& a, const u8* by) {
  U b;
  std::memcpy(&b, by, sizeof b);
  // Unlike red of global memory these keep subnormals of fp32, as an H200 showed.
  update<U, I>(at, a, false, b, b);
}

}  // namespace

void reduce(u8* at, const u8* by, u32 flags) {
  const Atomic a(flags);
  if (a.bytes == 2)
    reduce_one<u16, i16>(at, a, by);
  else if (a.bytes == 4)
    reduce_one<u32, i32>(at, a, by);
  else
    reduce_one<u64, i64>(at, a, by);
}

}  // namespace vm
