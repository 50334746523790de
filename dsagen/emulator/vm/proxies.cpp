// Accesses by asynchronous copies, and of the shared memory of other CTAs.
//
// What a bulk copy reads, it reads until its bytes are counted by an mbarrier, or until its thread has waited for its
// group: it shares the bytes as an agent of its own, the mbarrier or the groups of its warp.
#include <algorithm>

#include "machine.h"

namespace vm {
namespace {

// Nobody's lanes are looked at as one.
const auto kNobody = [](const Access&) { return false; };

}  // namespace

// A copy of at most 16 bytes, which the lane waits for itself; returns its number among the lane's.
u32 Order::issue_copy(const Warp& w, u32 lane, u32 offset, u32 bytes) {
  const u32 warp = w.index;
  const u32 number = ++clocks_[warp].issued[lane];
  Access written = now(w, lane);
  written.agent = static_cast<u16>(warps + warp);
  written.time = number;
  issue(w, lane, *this, offset, bytes, written);
  return number;
}

void Order::issue_bulk(const Warp& w, u32 lane, Order& owner, u32 offset, u32 bytes, u32 flags) {
  Access written = now(w, lane, flags);
  written.agent = kMany;
  written.time = kInFlight;
  issue(w, lane, owner, offset, bytes, written);
}

// What the generic proxy wrote needs a fence before the asynchronous proxy comes to it.
void Order::require_fence(const Warp& w, u32 lane, const Unit& unit, const char* act, const Where& where) const {
  const Access& last = unit.write;
  if (last.time == 0 || (last.flags & kAsyncProxy) != 0 || knows(w, lane, kProxied, last)) return;
  fail("proxy: %s %s, which %s warp %u, lane %u wrote (%s), without fence.proxy.async in between", act,
       describe(where).c_str(), cta_name(*cta_->launch, last.cta).c_str(), last.warp, last.lane,
       place(*cta_, last.pc).c_str());
}

void Order::issue(const Warp& w, u32 lane, Order& owner, u32 offset, u32 bytes, const Access& written) {
  const Where where{true, owner.linear_, offset, bytes};
  owner.shadow_->visit(offset, bytes, &written, kNobody, [&](Unit& unit) {
    check_unit(w, lane, unit, *owner.shadow_, Touch::kWrite, 0, where);
    if ((written.flags & kAsyncProxy) != 0) require_fence(w, lane, unit, "a bulk copy into", where);
  });
}

// From here on who knows of the agent's time knows of the copy.
void Order::land_bulk(u32 offset, u32 bytes, u32 agent, u32 time) {
  Access* const last = &visitors_[~u64{agent}];
  shadow_->visit(offset, bytes, nullptr, kNobody, [&](Unit& unit) {
    unit.write.cta = linear_;
    unit.write.agent = static_cast<u16>(agent);
    unit.write.time = time;
    *last = unit.write;
  });
}

// Adds one that reads, or changes atomically, to the unit's; those of whom the lane knows need not be kept.
void Order::share_unit(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, const Sharers& me, const Where& where) {
  const bool strong = (me.flags & kStrong) != 0;
  if (!knows(w, lane, kSeen, unit.write))
    clash(lane, strong ? "reduction by a bulk copy" : "read by a bulk copy", unit.write, "writes", where);
  if ((me.flags & kAsyncProxy) != 0)
    require_fence(w, lane, unit, strong ? "a bulk reduction of" : "a bulk copy from", where);
  Sharers& now = unit.sharers;
  Access culprit;
  if (now.lanes != 0 && ((now.flags & kStrong) != 0) != strong) {
    check_sharers(w, lane, unit, shadow, strong ? "reduction by a bulk copy" : "read by a bulk copy", where);
    shadow.drop(now);
  } else if (now.lanes != 0 && now.agent != kMany && ordered(w, lane, now, culprit)) {
    now.lanes = 0;
  }
  if (now.lanes == 0) {
    now = me;
    return;
  }
  if (now.agent != kMany) shadow.spread(unit);
  SharerRow& others = shadow.list_to_change(now).others;
  const auto same = [&](const Sharers& other) {
    return other.cta == me.cta && other.agent == me.agent && other.lanes == me.lanes && other.time == me.time &&
           other.flags == me.flags;
  };
  if (std::none_of(others.begin(), others.end(), same)) others.push_back(me);
}

void Order::share_bulk(const Warp& w, u32 lane, Order& owner, u32 offset, u32 bytes, u32 cta, u32 agent, u32 time,
                       u32 flags) {
  const Where where{true, owner.linear_, offset, bytes};
  const auto marked = static_cast<u16>(flags | w.index << kWarpShift);
  const Sharers me{cta, static_cast<u16>(agent), marked, 1u << lane, time, w.now};
  owner.shadow_->visit(offset, bytes, nullptr, kNobody, [&](Unit& unit) {
    share_unit(w, lane, unit, *owner.shadow_, me, where);
  });
}

void Order::end_shared_bulk(u32 offset, u32 bytes, u32 cta, u32 agent, u32 time, u32 pc) {
  const auto end = [&](Sharers& sharers) {
    if (sharers.cta == cta && sharers.agent == agent && sharers.time == kInFlight && sharers.pc == pc)
      sharers.time = time;
  };
  shadow_->visit(offset, bytes, nullptr, kNobody, [&](Unit& unit) {
    if (unit.sharers.lanes == 0) return;
    if (unit.sharers.agent != kMany) return end(unit.sharers);
    for (Sharers& other : shadow_->list(unit.sharers).others) end(other);
  });
}

void Order::global_bulk(const Warp& w, u32 lane, u32 region, u64 offset, u64 bytes, Touch touch, u32 time) {
  Access written = now(w, lane, kAsyncProxy);
  // Of groups, reads are one agent and what is done is another.
  written.agent = static_cast<u16>(3 * warps + w.index);
  written.time = time;
  const Sharers me{linear_, written.agent, static_cast<u16>(kStrong | kAsyncProxy | w.index << kWarpShift), 1u << lane,
                   time, w.now};
  while (bytes != 0) {
    const u32 first = static_cast<u32>(offset % GlobalOrder::kPageBytes);
    const u32 count = static_cast<u32>(std::min<u64>(bytes, GlobalOrder::kPageBytes - first));
    const Where where{false, region, offset, count};
    GlobalOrder::Page& page = global_->page(region, offset / GlobalOrder::kPageBytes);
    std::unique_lock<std::mutex> guard(page.lock, std::defer_lock);
    if (global_->locks) guard.lock();
    page.shadow->visit(first, count, touch == Touch::kWrite ? &written : nullptr, kNobody, [&](Unit& unit) {
      if (touch == Touch::kStrong) return share_unit(w, lane, unit, *page.shadow, me, where);
      if (touch == Touch::kWrite) check_unit(w, lane, unit, *page.shadow, Touch::kWrite, 0, where);
      if (touch == Touch::kRead) check_write(w, lane, unit, Touch::kRead, where);
      require_fence(w, lane, unit, touch == Touch::kWrite ? "a bulk copy into" : "a bulk copy from", where);
    });
    offset += count;
    bytes -= count;
  }
}

void Order::wait_groups(const Warp& w, u32 lane, u32 count, bool done) {
  if (count == 0) return;
  Clock& seen = own(clocks_[w.index], lane).views[kSeen];
  seen.raise(2 * warps + w.index, lane, count);
  if (done) seen.raise(3 * warps + w.index, lane, count);
}

bool Order::knows_write(const Warp& w, u32 lane, Order& owner, u32 offset, View view, Access& found) {
  bool known = true;
  owner.shadow_->visit(offset, 4, nullptr, kNobody, [&](Unit& unit) {
    found = unit.write;
    known = knows(w, lane, view, unit.write);
  });
  return known;
}

// ---- the shared memory of other CTAs ----

void Order::note_visitor(const Warp& w, u32 lane, Order& owner) const {
  owner.visitors_[u64{linear_} << 16 | w.index << 8 | lane] = now(w, lane);
}

void Order::remote(const Warp& w, u32 lane, Order& owner, u32 offset, u32 bytes, Touch touch, u32 flags) {
  if (!knows_of(w, lane, owner.linear_))
    fail("access of the shared memory of %s: nothing has told this thread that the CTA has started; a barrier of the "
         "cluster does", cta_name(*cta_->launch, owner.linear_).c_str());
  note_visitor(w, lane, owner);
  const Access mine = now(w, lane, flags);
  const Where where{true, owner.linear_, offset, bytes};
  owner.shadow_->visit(offset, bytes, touch == Touch::kWrite ? &mine : nullptr, kNobody, [&](Unit& unit) {
    check_unit(w, lane, unit, *owner.shadow_, touch, flags, where);
  });
}

void Order::require_others_done() {
  for (const auto& [visitor, last] : visitors_) {
    if (exits_.knows(linear_, kSeen, last.cta, last.agent, last.lane, last.time)) continue;
    if (last.agent >= warps)
      fail("%s ends though none of its threads has waited for the bytes of a bulk copy (%s)",
           cta_name(*cta_->launch, linear_).c_str(), place(*cta_, last.pc).c_str());
    fail("%s ends while %s warp %u, lane %u may still come to its shared memory (%s): nothing orders that access "
         "before the end", cta_name(*cta_->launch, linear_).c_str(), cta_name(*cta_->launch, last.cta).c_str(),
         last.warp, last.lane, place(*cta_, last.pc).c_str());
  }
}

}  // namespace vm
