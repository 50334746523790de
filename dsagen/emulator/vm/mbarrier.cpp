// Barriers in shared memory, which count arrivals and the bytes of asynchronous copies.
#include <algorithm>

#include "machine.h"

namespace vm {
namespace {

// The 64 bits in memory: pending 20, expected 20, announced bytes 23 (biased), phase 1.
struct Mbarrier {
  i32 pending, expected, bytes;
  u32 phase;
};
constexpr i32 kByteBias = 1 << 22;
constexpr u32 kMostArrivals = (1u << 20) - 1;
constexpr i32 kMostBytes = (1 << 20) - 1;
// Flags of arrivals and waits: that they order nothing; that they do so beyond the CTA; and that they reach one.
enum Flag : u32 { kRelaxedFlag = 1, kClusterScope = 2, kAnyCta = 4 };
// What an arrival does besides, in its imm.
enum Kind : i32 { kDrop = 1, kIncomplete = 2 };

Mbarrier load(const u8* at) {
  u64 word;
  std::memcpy(&word, at, 8);
  return {static_cast<i32>(word & 0xfffff), static_cast<i32>(word >> 20 & 0xfffff),
          static_cast<i32>(word >> 40 & 0x7fffff) - kByteBias, static_cast<u32>(word >> 63)};
}

u64 packed(const Mbarrier& b) {
  return static_cast<u64>(b.pending) | static_cast<u64>(b.expected) << 20 |
         static_cast<u64>(b.bytes + kByteBias) << 40 | static_cast<u64>(b.phase) << 63;
}

int offset_of(const Cta& cta, u32 address) { return static_cast<int>(address - cta.shared_base); }

u8* bytes_of(Cta& cta, u32 address, const char* what) {
  if (address % 8 != 0) fail("%s: shared address %#x is misaligned", what, address);
  u8* at = shared_bytes(cta, address, 8, what);
  if (cta.mbarriers.find(address) == cta.mbarriers.end())
    fail("%s: no mbarrier was initialised at shared byte %d", what, offset_of(cta, address));
  return at;
}

// The CTA in whose shared memory an instruction's mbarrier lies; without kAnyCta it is the warp's.
Cta& mbarrier_owner(Warp& w, const Ins& i, u32 address, const char* what) {
  if ((i.flags & kAnyCta) != 0) return owner_of(*w.cta, address, what);
  require_own(*w.cta, address, what);
  return *w.cta;
}

// Stores the barrier, and turns its phase where nothing is pending any more.
void settle(Cta& cta, u32 address, u8* at, Mbarrier b) {
  if (b.bytes < -kMostBytes || b.bytes > kMostBytes)
    fail("mbarrier: %d announced bytes are out of range, which is %d at most", b.bytes, kMostBytes);
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1, b.pending = b.expected;
    MbarrierClocks& clocks = cta.mbarriers[address];
    clocks.phases++;
    if (cta.order.on) {
      std::swap(clocks.completed, clocks.arriving);
      clocks.arriving.clear();
      std::swap(clocks.far_completed, clocks.far_arriving);
      clocks.far_arriving.clear();
      // The bulk copies of the phase.
      clocks.completed.views[kSeen].raise_all(clocks.agent, clocks.phases);
      if (clocks.far_agent != 0) clocks.far_completed.views[kSeen].raise_all(clocks.far_agent, clocks.phases);
    }
  }
  const u64 word = packed(b);
  std::memcpy(at, &word, 8);
  cta.progress++;
}

// Before an arrival: what the lanes did so far happens before the end of the phase, unless the arrival is relaxed, or
// reaches another CTA and is of the scope of its own.
void release(Warp& w, const Ins& i, u32 lanes, Cta& owner, u32 address, const char* what) {
  each_lane(lanes, [&](int l) { mbarrier_bytes(w, l, owner, address, what); });
  if (!w.cta->order.on || (i.flags & kRelaxedFlag) != 0) return;
  MbarrierClocks& clocks = owner.mbarriers[address];
  if (&owner == w.cta) return w.cta->order.release(w, lanes, clocks.arriving);
  each_lane(lanes, [&](int l) { w.cta->order.note_visitor(w, static_cast<u32>(l), owner.order); });
  if ((i.flags & kClusterScope) != 0) w.cta->order.release(w, lanes, clocks.far_arriving, owner.linear);
}

// The same for all lanes at once, where they are sure to arrive in one phase of one barrier; `x` is its address.
bool release_together(Warp& w, const Ins& i, u32 mask, const u16* x, u32 count, const char* what) {
  const u32 address = narrow_address(w, x, __builtin_ctz(mask));
  bool same = true;
  each_lane(mask, [&](int l) { same &= narrow_address(w, x, l) == address; });
  if (!same) return false;
  Cta& owner = mbarrier_owner(w, i, address, what);
  const Mbarrier b = load(mbarrier_bytes(w, __builtin_ctz(mask), owner, address, what));
  if (b.pending < static_cast<i32>(count)) return false;
  release(w, i, mask, owner, address, what);
  return true;
}

void init(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  Cta& cta = *w.cta;
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x, l), count = w.row(x[3])[l];
    if (count == 0 || count > kMostArrivals) fail("mbarrier.init: count %u is outside 1 to %u", count, kMostArrivals);
    if (address % 8 != 0) fail("mbarrier.init: shared address %#x is misaligned", address);
    u8* at = shared_bytes(cta, address, 8, "mbarrier.init");
    const auto [entry, fresh] = cta.mbarriers.try_emplace(address);
    if (!fresh) fail("mbarrier.init: shared byte %d holds an mbarrier already", offset_of(cta, address));
    entry->second.agent = cta.order.new_agent();
    if (cta.cluster->members.size() > 1) entry->second.far_agent = cta.order.new_agent();
    entry->second.initialiser = static_cast<u32>(w.thread(l));
    if (cta.order.on)
      cta.order.shared(w, static_cast<u32>(l), address - cta.shared_base, 8, Touch::kWrite);
    const u64 word = packed({static_cast<i32>(count), static_cast<i32>(count), 0, 0});
    std::memcpy(at, &word, 8);
    std::memset(cta.shared_valid.data() + (at - cta.shared.data()), 1, 8);
  });
}

void inval(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x, l);
    u8* at = mbarrier_bytes(w, l, *w.cta, address, "mbarrier.inval");
    const Mbarrier b = load(at);
    if (b.bytes != 0)
      fail("mbarrier.inval: the mbarrier at shared byte %d still waits for %d bytes", offset_of(*w.cta, address),
           b.bytes);
    w.cta->mbarriers.erase(address);
    std::memset(w.cta->shared_valid.data() + (at - w.cta->shared.data()), 0, 8);
  });
}

// One lane's arrival after its release; the token of before.
u64 arrive_as(Warp& w, const Ins& i, u32 address, i32 count, i32 bytes, const char* what) {
  Cta& owner = mbarrier_owner(w, i, address, what);
  w.cta->progress++;
  if (i.imm == 0) return arrive(owner, address, count, bytes, what);
  u8* at = bytes_of(owner, address, what);
  Mbarrier b = load(at);
  if ((i.imm & kIncomplete) != 0 && count >= b.pending)
    fail("%s: the last of the arrivals, though .noComplete says that it is not", what);
  if ((i.imm & kDrop) == 0) return arrive(owner, address, count, bytes, what);
  // From the next phase on fewer are expected.
  const u64 token = packed(b);
  if (count > b.expected) fail("%s: %d dropped of %d expected arrivals", what, count, b.expected);
  b.expected -= count;
  const u64 word = packed(b);
  std::memcpy(at, &word, 8);
  arrive(owner, address, count, bytes, what);
  return token;
}

// State, address, count.
void arrive_count(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const char* const what = i.imm & kDrop ? "mbarrier.arrive_drop" : "mbarrier.arrive";
  u32 counts = 0;
  each_lane(mask, [&](int l) { counts += w.row(x[4])[l]; });
  const bool together = release_together(w, i, mask, x + 1, counts, what);
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x + 1, l);
    const i32 count = static_cast<i32>(w.row(x[4])[l]);
    if (count < 1) fail("%s: a count of %d", what, count);
    if (!together) release(w, i, 1u << l, mbarrier_owner(w, i, address, what), address, what);
    put<u64>(w.row(x[0]), l, arrive_as(w, i, address, count, 0, what));
  });
}

// State, address, bytes. The bytes count before the arrival does.
void arrive_expect(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const char* const what = "mbarrier.arrive.expect_tx";
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x + 1, l);
    const i32 bytes = static_cast<i32>(w.row(x[4])[l]);
    release(w, i, 1u << l, mbarrier_owner(w, i, address, what), address, what);
    put<u64>(w.row(x[0]), l, arrive_as(w, i, address, 1, bytes, what));
  });
}

// Address, bytes; imm is the sign.
void expect_bytes(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const char* const what = i.imm > 0 ? "mbarrier.expect_tx" : "mbarrier.complete_tx";
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x, l);
    Cta& owner = mbarrier_owner(w, i, address, what);
    mbarrier_bytes(w, l, owner, address, what);
    arrive(owner, address, 0, static_cast<i32>(w.row(x[3])[l]) * i.imm, what);
    w.cta->progress++;
  });
}

// Arrivals that a state's phase still waited for.
void pending_count(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) { w.row(x[0])[l] = w.row(x[1])[l] & kMostArrivals; });
}

// Lanes that have seen a phase completed know what led to it; those of one barrier do so at once.
void acquire_phases(Warp& w, const Ins& i, const u16* x, u32 left) {
  while (left != 0) {
    const u32 address = narrow_address(w, x + 1, __builtin_ctz(left));
    u32 same = 0;
    each_lane(left, [&](int l) { same |= static_cast<u32>(narrow_address(w, x + 1, l) == address) << l; });
    const MbarrierClocks& clocks = w.cta->mbarriers[address];
    w.cta->order.acquire(w, same, clocks.completed);
    if ((i.flags & kClusterScope) != 0) w.cta->order.acquire(w, same, clocks.far_completed);
    left &= ~same;
  }
}

// Predicate, address, parity or state (imm 1). A failed wait lets the others run before it is asked again.
void wait(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32 done = 0;
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x + 1, l);
    const u32 parity = i.imm == 1 ? w.row(x[4])[l + kLanes] >> 31 : w.row(x[4])[l];
    if (parity > 1) fail("mbarrier wait: parity %u is neither 0 nor 1", parity);
    require_own(*w.cta, address, "mbarrier wait");
    if (load(mbarrier_bytes(w, l, *w.cta, address, "mbarrier wait")).phase != parity) {
      done |= 1u << l;
    } else
      w.poll_address = address, w.poll_parity = parity, w.poll_pc = w.now, w.polls_memory = false;
  });
  if (w.cta->order.on && (i.flags & kRelaxedFlag) == 0) acquire_phases(w, i, x, done);
  w.set_predicate(x[0], mask, done);
  w.polling = mask & ~done;
  if (w.polling != 0) yield_lanes(w, w.polling);
}

// What the lanes have initialised so far becomes visible to the asynchronous proxy.
void fence_init(Warp& w, const Ins&, u32 mask) {
  if (!w.cta->order.on) return;
  for (auto& [address, clocks] : w.cta->mbarriers) {
    const u32 lane = clocks.initialiser % kLanes;
    if (clocks.initialiser / kLanes == w.index && (mask >> lane & 1)) clocks.fenced = w.cta->order.now(w, lane);
  }
}

// Whether a lane knows that the mbarrier was initialised, by way of fence.mbarrier_init and a relaxed arrival.
bool knows_fenced(Warp& w, int l, const Cta& owner, const MbarrierClocks& clocks) {
  Access fenced = clocks.fenced;
  if (fenced.time == 0) return false;
  fenced.cta = owner.linear;
  fenced.agent = static_cast<u16>(clocks.agent);
  fenced.time = kInitialised;
  return w.cta->order.knows(w, static_cast<u32>(l), kSeen, fenced);
}

const Register registers[] = {{"mbarrier_init", init},
                              {"mbarrier_inval", inval},
                              {"mbarrier_arrive", arrive_count},
                              {"mbarrier_arrive_expect", arrive_expect},
                              {"mbarrier_expect", expect_bytes},
                              {"mbarrier_pending", pending_count},
                              {"mbarrier_wait", wait},
                              {"fence_mbarrier_init", fence_init}};

}  // namespace

u8* mbarrier_bytes(Warp& w, int lane, Cta& owner, u32 address, const char* what) {
  w.cta->fault_lane = static_cast<u32>(lane);
  u8* at = bytes_of(owner, address, what);
  Order& order = w.cta->order;
  const u32 offset = address - owner.shared_base;
  Access writer;
  if (order.on && !order.knows_write(w, static_cast<u32>(lane), owner.order, offset, kSeen, writer) &&
      !knows_fenced(w, lane, owner, owner.mbarriers[address]))
    fail("race: %s of the mbarrier at shared byte %u, which %s warp %u, lane %u initialises (%s); nothing orders the "
         "two", what, offset, cta_name(*w.cta->launch, writer.cta).c_str(), writer.warp, writer.lane,
         place(*w.cta, writer.pc).c_str());
  return at;
}

u64 arrive(Cta& owner, u32 address, i32 count, i32 bytes, const char* what) {
  u8* at = bytes_of(owner, address, what);
  Mbarrier b = load(at);
  const u64 token = packed(b);
  if (count > b.pending)
    fail("%s: %d arrivals at the mbarrier at shared byte %d, whose phase waits for %d", what, count,
         offset_of(owner, address), b.pending);
  b.pending -= count;
  b.bytes += bytes;
  settle(owner, address, at, b);
  return token;
}

// Without .noinc, a thread's copies count as an arrival that nobody has expected.
void expect_one_more(Cta& owner, u32 address) {
  u8* at = bytes_of(owner, address, "cp.async.mbarrier.arrive");
  Mbarrier b = load(at);
  b.pending++;
  settle(owner, address, at, b);
}

void require_visible(Warp& w, int lane, Cta& owner, u32 address) {
  Order& order = w.cta->order;
  if (!order.on) return;
  const MbarrierClocks& clocks = owner.mbarriers[address];
  if (knows_fenced(w, lane, owner, clocks)) return;
  if (clocks.fenced.time != 0 && order.knows(w, static_cast<u32>(lane), kSeen, clocks.fenced)) return;
  Access writer;
  const u32 offset = address - owner.shared_base;
  if (order.knows_write(w, static_cast<u32>(lane), owner.order, offset, kProxied, writer)) return;
  fail("proxy: a bulk copy completes on the mbarrier at shared byte %u, which warp %u, lane %u initialises (%s), with "
       "neither fence.mbarrier_init nor fence.proxy.async in between", offset, writer.warp, writer.lane,
       place(*w.cta, writer.pc).c_str());
}

std::string describe_mbarrier(const Cta& cta, u32 address) {
  if (cta.mbarriers.find(address) == cta.mbarriers.end()) return "not initialised";
  const Mbarrier b = load(cta.shared.data() + (address - cta.shared_base));
  return print("%d of %d arrivals and %d bytes are missing, phase %u", b.pending, b.expected, b.bytes, b.phase);
}

void require_no_bytes_awaited(const Cta& cta) {
  for (const auto& [address, clocks] : cta.mbarriers) {
    const Mbarrier b = load(cta.shared.data() + (address - cta.shared_base));
    if (b.bytes > 0)
      fail("the CTA ends while the mbarrier at shared byte %d waits for %d bytes that were announced and never came",
           offset_of(cta, address), b.bytes);
    if (b.bytes < 0)
      fail("the CTA ends with %d bytes at the mbarrier at shared byte %d that nobody has announced", -b.bytes,
           offset_of(cta, address));
  }
}

}  // namespace vm
