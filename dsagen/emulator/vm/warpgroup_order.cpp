// Reads of shared memory by the products of a warpgroup, in the order of all accesses.
//
// They come by the asynchronous proxy: what threads have stored needs a fence.proxy.async on the way, and all threads of
// the four warps have to know of it. They end for a thread that knows of a wait for their group.
#include <algorithm>

#include "machine.h"

namespace vm {

u16 Order::warpgroup_agent(u32 warp) const { return static_cast<u16>(first_warpgroup_ + warp / kGroupWarps); }

// Whether all lanes of the four warps know of an access by whichever lane, in the way that a product needs.
bool Order::known_to_warpgroup(u32 first, const Access& access) const {
  if (access.cta != linear_) return false;
  const auto knows_lanes = [&](const Clock& clock) {
    if (clock.knows_all(access.agent, access.time)) return true;
    for (u32 l = 0; l < kLanes; l++)
      if (!clock.knows(access.agent, l, access.time)) return false;
    return true;
  };
  for (u32 n = first; n < first + kGroupWarps; n++) {
    const Knowledge& common = clocks_[n].common;
    if (!knows_lanes(common.views[kSeen])) return false;
    if (!(access.flags & kAsyncProxy) && !knows_lanes(common.views[kProxied])) return false;
  }
  return true;
}

// The same of a single lane's access, by a closer look.
void Order::require_known_to_warpgroup(u32 first, const Access& written, const Where& where) {
  for (u32 n = first; n < first + kGroupWarps; n++) {
    const Warp& w = cta_->warps[n];
    for (u32 l = 0; l < kLanes; l++) {
      if (!knows(w, l, kSeen, written)) clash(l, "read by wgmma", written, "writes", where);
      if ((written.flags & kAsyncProxy) == 0 && !knows(w, l, kProxied, written))
        fail("proxy: wgmma reads %s, which warp %u, lane %u wrote (%s), without fence.proxy.async in between",
             describe(where).c_str(), written.warp, written.lane, place(*cta_, written.pc).c_str());
    }
  }
}

void Order::share_with_warpgroup(const Warp& w, Unit& unit, const Sharers& me, const Where& where) {
  Sharers& now = unit.sharers;
  if (now.lanes != 0 && (now.flags & kStrong) != 0) {
    check_sharers(w, 0, unit, *shadow_, "read by wgmma", where);
    shadow_->drop(now);
  }
  if (now.lanes == 0 || (now.agent == me.agent && now.cta == me.cta)) {
    now = me;
    return;
  }
  if (now.agent != kMany) shadow_->spread(unit);
  SharerRow& others = shadow_->list_to_change(now).others;
  for (Sharers& other : others)
    if (other.agent == me.agent) {
      other = me;
      return;
    }
  others.push_back(me);
}

// A product of the warp's warpgroup, of the group `time`, reads 16 bytes at each address until it is waited for.
void Order::read_by_warpgroup(const Warp& w, u32 time, const std::vector<u32>& addresses) {
  const u32 first = w.index / kGroupWarps * kGroupWarps;
  const Sharers me{linear_, warpgroup_agent(w.index), kByWarpgroup, kFullMask, time, w.now};
  // An operand has few writers, and each of them has mostly written at one time.
  std::array<Access, 16> found{};
  const auto known = [&](const Access& access) {
    if (access.time == 0) return false;
    Access& last = found[access.agent % found.size()];
    if (access.time == last.time && access.agent == last.agent && access.cta == last.cta && access.flags == last.flags)
      return true;
    if (!known_to_warpgroup(first, access)) return false;
    last = access;
    return true;
  };
  for (const u32 address : addresses) {
    const Where where{true, linear_, address - kSharedReserve, 16};
    const auto read = [&](Unit& unit) {
      if (unit.write.time != 0 && !known(unit.write)) require_known_to_warpgroup(first, unit.write, where);
      share_with_warpgroup(w, unit, me, where);
    };
    u32 count = 0;
    if (Unit* unit = shadow_->exact(address - kSharedReserve, 16, false, known, count))
      read(*unit);
    else
      shadow_->visit(address - kSharedReserve, 16, nullptr, known, read);
  }
}

void Order::wait_for_warpgroup(const Warp& w, u32 time) {
  clocks_[w.index].common.views[kSeen].raise_all(warpgroup_agent(w.index), time);
}

}  // namespace vm
