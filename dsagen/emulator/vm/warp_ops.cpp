// What lanes of a warp do together: shuffles, votes, matches, reductions; and control flow.
#include "machine.h"

namespace vm {

bool gather(Warp& w, u32& mask, u32 need) {
  need &= w.born;
  if (need & ~w.live) fail("lanes %#x take part but have exited", need & ~w.live);
  if (mask & ~need) fail("lanes %#x execute this with a member mask (%#x) that does not name them", mask & ~need, need);
  u32 here = mask;
  for (u32 m = w.parked; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    if (w.pc[l] == w.now) here |= 1u << l;
  }
  if ((need & ~here) == 0) {
    const u32 joined = here & need & ~mask;
    w.parked &= ~joined;
    w.runnable |= joined;
    w.group |= joined;
    mask |= joined;
    return true;
  }
  w.set_pc(w.group & ~mask, w.now + 1);
  w.set_pc(mask, w.now);
  w.parked |= mask;
  w.runnable &= ~mask;
  w.stop = true;
  return false;
}

void yield_lanes(Warp& w, u32 mask) {
  w.set_pc(w.group, w.now + 1);
  w.yielded |= mask;
  w.stop = true;
}

void poll(Warp& w, u32 mask, u64 address) {
  w.polling = mask;
  w.poll_pc = w.now;
  w.poll_address = address;
  w.polls_memory = true;
  yield_lanes(w, mask);
}

namespace {

// An instruction of the lanes that its member mask, operand MEMBERS, names. Lanes of the group may name different sets:
// those of the first lane's set act, the others come to the instruction on their own.
template <int MEMBERS, void (*F)(Warp&, const Ins&, u32)>
void together(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32* members = w.row(x[MEMBERS]);
  const u32 need = members[__builtin_ctz(mask)];
  u32 same = 0;
  for (int l = 0; l < kLanes; l++) same |= static_cast<u32>(members[l] == need) << l;
  const u32 rest = mask & ~same;
  same &= mask;
  if (rest != 0) {
    w.set_pc(rest, w.now);
    w.group &= ~rest;
  }
  if (!gather(w, same, need)) return;
  each_lane(same, [&](int l) {
    if (members[l] != need) fail("lane %d names the lanes %#x, others of its set %#x", l, members[l], need);
  });
  F(w, i, same);
  if (rest != 0) {
    w.set_pc(w.group, w.now + 1);
    w.stop = true;
  }
}

enum ShuffleMode { kUp, kDown, kButterfly, kIndex };

// Operands: d, p, a, b, c, member mask; imm is the mode.
void shfl(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32 source[kLanes], bits = 0;
  std::memcpy(source, w.row(x[2]), sizeof source);
  u32 control_b[kLanes], control_c[kLanes];
  std::memcpy(control_b, w.row(x[3]), sizeof control_b);
  std::memcpy(control_c, w.row(x[4]), sizeof control_c);
  u32* d = w.row(x[0]);
  each_lane(mask, [&](int l) {
    const int b = static_cast<int>(control_b[l] & 31);
    const int clamp = static_cast<int>(control_c[l] & 31), segment = static_cast<int>(control_c[l] >> 8 & 31);
    const int low = l & segment, high = low | (clamp & ~segment);
    int j = l;
    bool inside = false;
    switch (i.imm) {
      case kUp: j = l - b, inside = j >= high; break;
      case kDown: j = l + b, inside = j <= high; break;
      case kButterfly: j = l ^ b, inside = j <= high; break;
      case kIndex: j = low | (b & ~segment), inside = j <= high; break;
    }
    if (!inside) j = l;
    if (!(mask >> j & 1)) fail("shfl: lane %d reads lane %d, which does not take part", l, j);
    bits |= static_cast<u32>(inside) << l;
    d[l] = source[j];
  });
  w.set_predicate(x[1], mask, bits);
}

enum VoteMode { kAll, kAny, kUni, kBallot };

// Operands: d (a predicate, for ballot a slot), source predicate, member mask; imm is the mode.
void vote(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32 votes = w.predicate(x[1]) & mask;
  if (i.imm == kBallot) {
    u32* d = w.row(x[0]);
    each_lane(mask, [=](int l) { d[l] = votes; });
    return;
  }
  const bool all = votes == mask, none = votes == 0;
  const bool result = i.imm == kAll ? all : i.imm == kAny ? !none : all || none;
  w.set_predicate(x[0], mask, result ? kFullMask : 0);
}

// Operands: p, member mask. The leader is the lowest lane.
void elect(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u32 leader = static_cast<u32>(__builtin_ctz(mask));
  u32* d = w.row(x[0]);
  each_lane(mask, [=](int l) { d[l] = leader; });
  w.set_predicate(x[1], mask, 1u << leader);
}

void bar_warp_sync(Warp& w, const Ins&, u32 mask) {
  if (w.cta->order.on) w.cta->order.meet(w, mask);
}

// d, a, member mask: the lanes whose a equals this lane's.
template <class T>
void match_any(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  T values[kLanes];
  for (int l = 0; l < kLanes; l++) values[l] = get<T>(w.row(x[1]), l);
  u32* d = w.row(x[0]);
  each_lane(mask, [&](int l) {
    u32 same = 0;
    for (int n = 0; n < kLanes; n++) same |= static_cast<u32>(values[n] == values[l]) << n;
    d[l] = same & mask;
  });
}

// d, p, a, member mask: all lanes and true where all have the same a, else none and false.
template <class T>
void match_all(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const T first = get<T>(w.row(x[2]), __builtin_ctz(mask));
  bool same = true;
  each_lane(mask, [&](int l) { same &= get<T>(w.row(x[2]), l) == first; });
  u32* d = w.row(x[0]);
  each_lane(mask, [=](int l) { d[l] = same ? mask : 0; });
  w.set_predicate(x[1], mask, same ? kFullMask : 0);
}

// Of f32; flags: 1 maximum, 2 of magnitudes, 4 NaN wins.
void redux_f32(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  // Codes in the order of their values, so that -0 < +0.
  const auto order = [](u32 bits) {
    return bits >> 31 ? -static_cast<i64>(bits & 0x7fffffff) - 1 : static_cast<i64>(bits);
  };
  bool found = false, nan = false;
  u32 out = 0;
  each_lane(mask, [&](int l) {
    const u32 bits = w.row(x[1])[l] & (i.flags & 2 ? 0x7fffffffu : kFullMask);
    if ((bits & 0x7fffffff) > 0x7f800000) {
      nan = true;
    } else if (!found || (i.flags & 1 ? order(bits) > order(out) : order(bits) < order(out))) {
      found = true, out = bits;
    }
  });
  if (!found || (nan && (i.flags & 4))) out = 0x7fffffff;
  u32* d = w.row(x[0]);
  each_lane(mask, [=](int l) { d[l] = out; });
}

enum ReduxKind { kAdd, kMinS, kMaxS, kMinU, kMaxU, kAnd, kOr, kXor, kFloat };

// d, a, member mask; imm is the kind.
void redux(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (i.imm == kFloat) return redux_f32(w, i, mask);
  const u32* a = w.row(x[1]);
  u32 out = a[__builtin_ctz(mask)];
  for (u32 m = mask & (mask - 1); m != 0; m &= m - 1) {
    const u32 b = a[__builtin_ctz(m)];
    const i32 so = static_cast<i32>(out), sb = static_cast<i32>(b);
    switch (i.imm) {
      case kAdd: out += b; break;
      case kMinS: out = so < sb ? out : b; break;
      case kMaxS: out = so > sb ? out : b; break;
      case kMinU: out = out < b ? out : b; break;
      case kMaxU: out = out > b ? out : b; break;
      case kAnd: out &= b; break;
      case kOr: out |= b; break;
      case kXor: out ^= b; break;
    }
  }
  u32* d = w.row(x[0]);
  each_lane(mask, [=](int l) { d[l] = out; });
}

void activemask(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32* d = w.row(x[0]);
  each_lane(mask, [=](int l) { d[l] = mask; });
}

// ---- control flow ----

void bra(Warp& w, const Ins& i, u32 mask) {
  const u32 target = static_cast<u32>(i.imm);
  if (mask == w.group) {
    w.next = target;
    return;
  }
  w.set_pc(w.group & ~mask, w.now + 1);
  w.set_pc(mask, target);
  w.stop = true;
}

void exit_lanes(Warp& w, const Ins&, u32 mask) {
  w.set_pc(w.group & ~mask, w.now + 1);
  w.live &= ~mask;
  if (w.live == 0) require_no_products(w);
  w.runnable &= ~mask;
  w.stop = true;
  w.cta->progress++;
  recheck_barriers(*w.cta);
  leave_cta(w, mask);
}

void nothing(Warp&, const Ins&, u32) {}

// setmaxnreg. How many registers a kernel starts with is not in its PTX; what all warps have in the end has to be there.
void set_registers(Warp& w, const Ins& i, u32 mask) {
  if (!gather(w, mask, w.born)) return;
  constexpr u32 kLeast = 24, kMost = 256, kUnit = 8, kOfAnSm = 65536;
  const u32 count = static_cast<u32>(i.imm);
  if (count < kLeast || count > kMost || count % kUnit != 0)
    fail("setmaxnreg: %u registers are no multiple of %u from %u to %u", count, kUnit, kLeast, kMost);
  w.registers = count;
  u32 sum = 0;
  for (const Warp& other : w.cta->warps) {
    if (other.registers == 0) return;
    sum += kLanes * other.registers;
  }
  if (sum > kOfAnSm)
    fail("setmaxnreg: the warps of the CTA now have %u registers, and a multiprocessor has %u", sum, kOfAnSm);
}

void pause(Warp& w, const Ins&, u32 mask) { yield_lanes(w, mask); }

void grid_wait(Warp& w, const Ins&, u32 mask) { w.grid_waited |= mask; }

void trap(Warp&, const Ins& i, u32) {
  fail("%s", i.imm == 1 ? "brkpt, and there is no debugger" : "trap");
}

void clock(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const u64 now = w.cta->executed;
  each_lane(mask, [&](int l) {
    w.row(x[0])[l] = static_cast<u32>(now);
    if (i.imm == 64) w.row(x[0])[l + kLanes] = static_cast<u32>(now >> 32);
  });
}

void unknown(Warp& w, const Ins& i, u32) {
  fail("%s: the emulator does not have this instruction", w.cta->launch->unknown[i.imm]);
}

const Register registers[] = {{"shfl", together<5, shfl>},
                              {"vote", together<2, vote>},
                              {"elect", together<2, elect>},
                              {"bar_warp_sync", together<0, bar_warp_sync>},
                              {"match_any_b32", together<2, match_any<u32>>},
                              {"match_any_b64", together<2, match_any<u64>>},
                              {"match_all_b32", together<3, match_all<u32>>},
                              {"match_all_b64", together<3, match_all<u64>>},
                              {"redux", together<2, redux>},
                              {"activemask", activemask},
                              {"bra", bra},
                              {"exit", exit_lanes},
                              {"nothing", nothing},
                              {"set_registers", set_registers},
                              {"pause", pause},
                              {"grid_wait", grid_wait},
                              {"trap", trap},
                              {"clock", clock},
                              {"unknown", unknown}};

}  // namespace
}  // namespace vm
