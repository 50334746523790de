// Asynchronous copies and the barriers in shared memory that count them.
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
// Flags of arrivals and waits that order nothing.
constexpr u32 kRelaxedFlag = 1;

u8* barrier_bytes(Cta& cta, u32 address, const char* what) {
  if (address % 8 != 0) fail("%s: shared address %#x is misaligned", what, address);
  u8* at = shared_bytes(cta, address, 8, what);
  if (cta.mbarriers.find(address) == cta.mbarriers.end())
    fail("%s: no mbarrier was initialised at shared byte %u", what, address - kSharedReserve);
  return at;
}

// The same for a warp, which has to know of the initialisation.
u8* barrier_bytes(Warp& w, int lane, u32 address, const char* what) {
  w.cta->fault_lane = static_cast<u32>(lane);
  u8* at = barrier_bytes(*w.cta, address, what);
  Order& order = w.cta->order;
  Access writer;
  if (order.on && !order.knows_write(w, static_cast<u32>(lane), address - kSharedReserve, kSeen, writer))
    fail("race: %s of the mbarrier at shared byte %u, which warp %u, lane %u initialises (%s); nothing orders the two",
         what,
         address - kSharedReserve, writer.warp, writer.lane, place(*w.cta, writer.pc).c_str());
  return at;
}


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

// Stores the barrier, and turns its phase where nothing is pending any more.
void settle(Cta& cta, u32 address, u8* at, Mbarrier b) {
  if (b.bytes <= -kByteBias || b.bytes >= kByteBias) fail("mbarrier: %d announced bytes are out of range", b.bytes);
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1, b.pending = b.expected;
    MbarrierClocks& clocks = cta.mbarriers[address];
    clocks.phases++;
    if (cta.order.on) {
      std::swap(clocks.completed, clocks.arriving);
      clocks.arriving.clear();
      // The bulk copies of the phase.
      clocks.completed.views[kSeen].raise_all(clocks.agent, clocks.phases);
    }
  }
  const u64 word = packed(b);
  std::memcpy(at, &word, 8);
  cta.progress++;
}

u64 arrive(Cta& cta, u32 address, i32 count, i32 bytes, const char* what) {
  u8* at = barrier_bytes(cta, address, what);
  Mbarrier b = load(at);
  const u64 token = packed(b);
  if (count > b.pending)
    fail("%s: %d arrivals at the mbarrier at shared byte %u, whose phase waits for %d", what, count,
         address - kSharedReserve, b.pending);
  b.pending -= count;
  b.bytes += bytes;
  settle(cta, address, at, b);
  return token;
}

// Before an arrival: what the lanes did so far happens before the end of the phase, unless the arrival is relaxed.
void release(Warp& w, const Ins& i, u32 lanes, u32 address, const char* what) {
  each_lane(lanes, [&](int l) { barrier_bytes(w, l, address, what); });
  if (w.cta->order.on && (i.flags & kRelaxedFlag) == 0)
    w.cta->order.release(w, lanes, w.cta->mbarriers[address].arriving);
}

// The same for all lanes at once, where they are sure to arrive in one phase of one barrier; `x` is its address.
bool release_together(Warp& w, const Ins& i, u32 mask, const u16* x, u32 count, const char* what) {
  const u32 address = narrow_address(w, x, __builtin_ctz(mask));
  bool same = true;
  each_lane(mask, [&](int l) { same &= narrow_address(w, x, l) == address; });
  if (!same) return false;
  if (load(barrier_bytes(w, __builtin_ctz(mask), address, what)).pending < static_cast<i32>(count)) return false;
  release(w, i, mask, address, what);
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
    if (!fresh) fail("mbarrier.init: shared byte %u holds an mbarrier already", address - kSharedReserve);
    entry->second.agent = cta.order.new_agent();
    entry->second.initialiser = static_cast<u32>(w.thread(l));
    if (cta.order.on) cta.order.shared(w, static_cast<u32>(l), address - kSharedReserve, 8, Touch::kWrite);
    const u64 word = packed({static_cast<i32>(count), static_cast<i32>(count), 0, 0});
    std::memcpy(at, &word, 8);
    std::memset(cta.shared_valid.data() + (at - cta.shared.data()), 1, 8);
  });
}

void inval(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x, l);
    u8* at = barrier_bytes(w, l, address, "mbarrier.inval");
    w.cta->mbarriers.erase(address);
    std::memset(w.cta->shared_valid.data() + (at - w.cta->shared.data()), 0, 8);
  });
}

// State, address, count.
void arrive_count(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32 counts = 0;
  each_lane(mask, [&](int l) { counts += w.row(x[4])[l]; });
  const bool together = release_together(w, i, mask, x + 1, counts, "mbarrier.arrive");
  each_lane(mask, [&](int l) {
    const i32 count = static_cast<i32>(w.row(x[4])[l]);
    if (!together) release(w, i, 1u << l, narrow_address(w, x + 1, l), "mbarrier.arrive");
    put<u64>(w.row(x[0]), l, arrive(*w.cta, narrow_address(w, x + 1, l), count, 0, "mbarrier.arrive"));
  });
}

// State, address, bytes. The bytes count before the arrival does.
void arrive_expect(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    const i32 bytes = static_cast<i32>(w.row(x[4])[l]);
    release(w, i, 1u << l, narrow_address(w, x + 1, l), "mbarrier.arrive.expect_tx");
    put<u64>(w.row(x[0]), l, arrive(*w.cta, narrow_address(w, x + 1, l), 1, bytes, "mbarrier.arrive.expect_tx"));
  });
}

// Address, bytes; imm is the sign.
void expect_bytes(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    const i32 bytes = static_cast<i32>(w.row(x[3])[l]) * i.imm;
    arrive(*w.cta, narrow_address(w, x, l), 0, bytes, "mbarrier.expect_tx");
  });
}

// Lanes that have seen a phase completed know what led to it; those of one barrier do so at once.
void acquire_phases(Warp& w, const u16* x, u32 left) {
  while (left != 0) {
    const u32 address = narrow_address(w, x + 1, __builtin_ctz(left));
    u32 same = 0;
    each_lane(left, [&](int l) { same |= static_cast<u32>(narrow_address(w, x + 1, l) == address) << l; });
    w.cta->order.acquire(w, same, w.cta->mbarriers[address].completed);
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
    if (load(barrier_bytes(w, l, address, "mbarrier wait")).phase != parity) {
      done |= 1u << l;
    } else
      w.poll_address = address, w.poll_parity = parity, w.poll_pc = w.now, w.polls_memory = false;
  });
  if (w.cta->order.on && (i.flags & kRelaxedFlag) == 0) acquire_phases(w, x, done);
  w.set_predicate(x[0], mask, done);
  w.polling = mask & ~done;
  if (w.polling != 0) yield_lanes(w, w.polling);
}

// ---- copies ----

bool has_earlier_copy(const Cta& cta, size_t index) {
  for (size_t n = 0; n < index; n++)
    if (cta.pending[n].kind == Pending::kCopy && cta.pending[n].bytes != 0 &&
        cta.pending[n].thread == cta.pending[index].thread)
      return true;
  return false;
}

void land(Cta& cta, const Pending& p) {
  u8* at = shared_bytes(cta, p.destination, p.bytes, "asynchronous copy");
  if (p.copied != 0) {
    const Warp& w = cta.warps[p.thread / kLanes];
    std::memcpy(at, global_source(cta, p.source, p.copied, w.grid_waited & p.lane_bit), p.copied);
  }
  std::memset(at + p.copied, 0, p.bytes - p.copied);
  std::memset(cta.shared_valid.data() + (at - cta.shared.data()), 1, p.bytes);
  cta.counters[kCopiedBytes] += p.bytes;
  if (!cta.order.on || p.kind != Pending::kBulk) return;
  const MbarrierClocks& clocks = cta.mbarriers[p.barrier];
  cta.order.land_bulk(p.destination - kSharedReserve, p.bytes, clocks.agent, clocks.phases + 1);
}

// Does what is pending at `index`; false where a copy of the thread has to land first. The entry is then empty.
bool finish(Cta& cta, size_t index) {
  Pending& p = cta.pending[index];
  if (p.kind == Pending::kArrive) {
    if (has_earlier_copy(cta, index)) return false;
    if (cta.order.on)
      cta.order.release_copies(p.thread / kLanes, p.thread % kLanes, p.number, cta.mbarriers[p.barrier].arriving);
    arrive(cta, p.barrier, 1, 0, "cp.async.mbarrier.arrive");
    p.barrier = 0;
  } else {
    land(cta, p);
    if (p.kind == Pending::kBulk) arrive(cta, p.barrier, 0, -static_cast<i32>(p.bytes), "complete_tx of a bulk copy");
    p.bytes = 0;
  }
  cta.progress++;
  return true;
}

bool is_empty(const Pending& p) { return p.kind == Pending::kArrive ? p.barrier == 0 : p.bytes == 0; }

void sweep(Cta& cta) {
  cta.pending.erase(std::remove_if(cta.pending.begin(), cta.pending.end(), is_empty), cta.pending.end());
}

bool at_once(Cta& cta) { return cta.launch->seed != 0 && cta.random.below(3) == 0; }

// Until it lands the destination holds nothing that may be read.
void issue(Cta& cta, Pending p, const char* what) {
  Warp& w = cta.warps[p.thread / kLanes];
  const u32 lane = p.thread % kLanes;
  if (p.kind == Pending::kArrive) {
    if (cta.order.on) p.number = cta.order.copies_issued(w.index, lane);
  } else {
    u8* at = shared_bytes(cta, p.destination, p.bytes, what);
    const u32 offset = p.destination - kSharedReserve;
    if (cta.order.on && p.kind == Pending::kBulk) cta.order.issue_bulk(w, lane, offset, p.bytes);
    if (cta.order.on && p.kind == Pending::kCopy) p.number = cta.order.issue_copy(w, lane, offset, p.bytes);
    std::memset(at, 0xff, p.bytes);
    std::memset(cta.shared_valid.data() + (at - cta.shared.data()), 0, p.bytes);
    if (p.copied != 0) global_source(cta, p.source, p.copied, w.grid_waited & p.lane_bit);
  }
  cta.pending.push_back(p);
  cta.progress++;
  if (at_once(cta) && finish(cta, cta.pending.size() - 1)) cta.pending.pop_back();
}

// Shared address, global address, bytes that are copied (the rest is zeros); imm is the size.
void copy(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  Cta& cta = *w.cta;
  const u32 size = static_cast<u32>(i.imm);
  each_lane(mask, [&](int l) {
    cta.fault_lane = static_cast<u32>(l);
    const u32 thread = static_cast<u32>(w.thread(l)), destination = narrow_address(w, x, l), copied = w.row(x[6])[l];
    const u64 source = wide_address(w, x + 3, l);
    if (copied > size) fail("cp.async: %u bytes of a source for %u bytes", copied, size);
    if (destination % size != 0 || source % size != 0) fail("cp.async of %u bytes: an address is misaligned", size);
    issue(cta, {Pending::kCopy, thread, cta.commit_groups[thread], destination, size, copied, source, 0, w.now,
                1u << l}, "cp.async");
  });
}

void commit(Warp& w, const Ins&, u32 mask) {
  Cta& cta = *w.cta;
  each_lane(mask, [&](int l) {
    cta.commit_groups[w.thread(l)]++;
    if (cta.order.on)
      cta.copies_committed[w.thread(l)].push_back(cta.order.copies_issued(w.index, static_cast<u32>(l)));
  });
}

// imm is how many groups may remain, -1: not even the open one.
void wait_copies(Warp& w, const Ins& i, u32 mask) {
  Cta& cta = *w.cta;
  for (size_t n = 0; n < cta.pending.size(); n++) {
    const Pending& p = cta.pending[n];
    if (p.kind != Pending::kCopy || p.bytes == 0 || p.thread / kLanes != w.index || !(mask & p.lane_bit)) continue;
    const u32 committed = cta.commit_groups[p.thread];
    if (i.imm < 0 || p.group + static_cast<u32>(i.imm) < committed) finish(cta, n);
  }
  sweep(cta);
  if (!cta.order.on) return;
  each_lane(mask, [&](int l) {
    const u32 lane = static_cast<u32>(l);
    const std::vector<u32>& marks = cta.copies_committed[w.thread(l)];
    const size_t left = static_cast<size_t>(std::max(i.imm, 0));
    if (i.imm < 0)
      cta.order.wait_copies(w, lane, cta.order.copies_issued(w.index, lane));
    else if (marks.size() > left)
      cta.order.wait_copies(w, lane, marks[marks.size() - 1 - left]);
  });
}

// An arrival once the thread's copies so far have landed; imm 1: the barrier's count does not include it yet.
void arrive_after_copies(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  Cta& cta = *w.cta;
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x, l);
    u8* at = barrier_bytes(w, l, address, "cp.async.mbarrier.arrive");
    if (i.imm == 1) {
      Mbarrier b = load(at);
      b.pending++;
      settle(cta, address, at, b);
    }
    issue(cta, {Pending::kArrive, static_cast<u32>(w.thread(l)), 0, 0, 0, 0, 0, address, w.now, 1u << l}, "");
  });
}

// The asynchronous proxy is to see the mbarrier's initialisation.
void require_visible(Warp& w, int l, u32 address) {
  const Order& order = w.cta->order;
  const u32 lane = static_cast<u32>(l);
  if (!order.on) return;
  const MbarrierClocks& clocks = w.cta->mbarriers[address];
  if (clocks.fenced.time != 0 && order.knows(w, lane, kSeen, clocks.fenced)) return;
  Access writer;
  if (w.cta->order.knows_write(w, lane, address - kSharedReserve, kProxied, writer)) return;
  fail("proxy: a bulk copy completes on the mbarrier at shared byte %u, which warp %u, lane %u initialises (%s), with "
         "neither "
       "fence.mbarrier_init nor fence.proxy.async in between", address - kSharedReserve, writer.warp, writer.lane,
       place(*w.cta, writer.pc).c_str());
}

// What the lanes have initialised so far becomes visible to the asynchronous proxy.
void fence_init(Warp& w, const Ins&, u32 mask) {
  if (!w.cta->order.on) return;
  for (auto& [address, clocks] : w.cta->mbarriers) {
    const u32 lane = clocks.initialiser % kLanes;
    if (clocks.initialiser / kLanes == w.index && (mask >> lane & 1)) clocks.fenced = w.cta->order.now(w, lane);
  }
}

void fence_proxy(Warp& w, const Ins&, u32 mask) {
  if (w.cta->order.on) w.cta->order.fence_proxy(w, mask);
}

// imm is the scope: 0 the CTA, 1 the device and beyond.
void fence(Warp& w, const Ins& i, u32 mask) {
  if (w.cta->order.on) w.cta->order.fence(w, mask, static_cast<u32>(i.imm));
}

// Shared address, global address, bytes, mbarrier.
void copy_bulk(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    w.cta->fault_lane = static_cast<u32>(l);
    const u32 destination = narrow_address(w, x, l), bytes = w.row(x[6])[l], barrier = narrow_address(w, x + 7, l);
    const u64 source = wide_address(w, x + 3, l);
    if (bytes == 0 || bytes % 16 != 0) fail("cp.async.bulk: %u bytes are no positive multiple of 16", bytes);
    if (destination % 16 != 0 || source % 16 != 0) fail("cp.async.bulk: an address is no multiple of 16");
    barrier_bytes(w, l, barrier, "cp.async.bulk");
    require_visible(w, l, barrier);
    issue(*w.cta, {Pending::kBulk, static_cast<u32>(w.thread(l)), 0, destination, bytes, bytes, source, barrier, w.now,
                   1u << l}, "cp.async.bulk");
  });
}

const Register registers[] = {{"mbarrier_init", init},
                              {"mbarrier_inval", inval},
                              {"mbarrier_arrive", arrive_count},
                              {"mbarrier_arrive_expect", arrive_expect},
                              {"mbarrier_expect", expect_bytes},
                              {"mbarrier_wait", wait},
                              {"copy_async", copy},
                              {"copy_async_commit", commit},
                              {"copy_async_wait", wait_copies},
                              {"copy_async_arrive", arrive_after_copies},
                              {"copy_bulk", copy_bulk},
                              {"fence", fence},
                              {"fence_proxy", fence_proxy},
                              {"fence_mbarrier_init", fence_init}};

}  // namespace

bool complete_some(Cta& cta, bool all) {
  bool any = false;
  const size_t chosen = all || cta.pending.empty() ? 0 : cta.random.below(static_cast<u32>(cta.pending.size()));
  for (size_t n = 0; n < cta.pending.size(); n++)
    if (all || n == chosen || cta.random.below(4) == 0) any |= finish(cta, n);
  sweep(cta);
  return any;
}

std::string describe_mbarrier(const Cta& cta, u32 address) {
  if (cta.mbarriers.find(address) == cta.mbarriers.end()) return "not initialised";
  const Mbarrier b = load(cta.shared.data() + (address - kSharedReserve));
  return print("%d of %d arrivals and %d bytes are missing, phase %u", b.pending, b.expected, b.bytes, b.phase);
}

}  // namespace vm
