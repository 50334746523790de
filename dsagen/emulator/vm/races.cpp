// Accesses that nothing orders.
#include <algorithm>

#include "machine.h"

namespace vm {

// Whether all lanes that an access may be of are known to the warp.
inline auto Order::sees_all(const Warp& w) const {
  const Clock& seen = clocks_[w.index].common.views[kSeen];
  return [&seen, home = linear_](const Access& access) {
    return access.time != 0 && access.cta == home && seen.knows_all(access.agent, access.time);
  };
}

// One access of a unit: first what is frequent.
inline void Order::check(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, Touch touch, u32 flags,
                         const Where& where) {
  const WarpClocks& mine = clocks_[w.index];
  const Access& last = unit.write;
  Sharers& now = unit.sharers;
  const bool known = last.time == 0 || (last.cta == linear_ &&
                                        mine.common.views[kSeen].knows_all(last.agent, last.time));
  if (!known) check_write(w, lane, unit, touch, where);
  if (touch == Touch::kWrite) {
    if (now.lanes != 0) check_sharers(w, lane, unit, shadow, "write", where);
  } else if (now.lanes == 0) {
    now = {linear_, static_cast<u16>(w.index), static_cast<u16>(flags), 1u << lane, mine.time, w.now};
  } else if (now.agent == w.index && now.time == mine.time && now.flags == flags && now.cta == linear_) {
    now.lanes |= 1u << lane;
    now.pc = w.now;
  } else {
    share(w, lane, unit, shadow, touch, flags, where);
  }
}

// The same for other files.
void Order::check_unit(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, Touch touch, u32 flags,
                       const Where& where) {
  check(w, lane, unit, shadow, touch, flags, where);
}

Access Order::now(const Warp& w, u32 lane, u32 flags) const {
  const u32 warp = w.index;
  return {linear_, static_cast<u16>(warp), static_cast<u8>(warp), static_cast<u8>(lane), clocks_[warp].time, w.now,
          flags, w.store};
}

bool Order::knows(const Warp& w, u32 lane, View view, const Access& access) const {
  if (access.time == 0) return true;
  const u32 warp = w.index;
  const WarpClocks& mine = clocks_[warp];
  if (access.cta == linear_ && access.lane == lane) {
    if (access.agent == warp) {
      if (view == kSeen || access.time <= mine.self[view][lane]) return true;
    } else if (access.agent == warps + warp && access.time <= mine.waited[view][lane]) {
      return true;
    }
  }
  if (mine.common.knows(linear_, view, access.cta, access.agent, access.lane, access.time)) return true;
  return (mine.own_mask >> lane & 1) && mine.own[lane]->knows(linear_, view, access.cta, access.agent, access.lane,
                                                              access.time);
}

// Whether what the sharers did happens before what the lane does now; else `culprit` is one that does not.
bool Order::ordered(const Warp& w, u32 lane, const Sharers& sharers, Access& culprit) const {
  // The warp of an asynchronous copy stands in its flags.
  const bool by_group = (sharers.flags & kByWarpgroup) != 0;
  const u32 warp = by_group                 ? (sharers.agent - first_warpgroup_) * kGroupWarps
                   : sharers.agent < warps ? sharers.agent
                                           : sharers.flags >> kWarpShift;
  culprit = {sharers.cta, sharers.agent, static_cast<u8>(warp), 0, sharers.time, sharers.pc, sharers.flags, 0};
  // All lanes at once, if all are known.
  const WarpClocks& mine = clocks_[w.index];
  if (sharers.cta == linear_ && sharers.time != kInFlight && mine.common.views[kSeen].knows_all(sharers.agent,
          sharers.time)) return true;
  for (u32 m = sharers.lanes; m != 0; m &= m - 1) {
    culprit.lane = static_cast<u8>(__builtin_ctz(m));
    if (!knows(w, lane, kSeen, culprit)) return false;
  }
  return true;
}

std::string cta_name(const Launch& launch, u32 linear) {
  return print("CTA (%u, %u, %u)", linear % launch.grid[0], linear / launch.grid[0] % launch.grid[1],
               linear / launch.grid[0] / launch.grid[1]);
}

// The lane's access meets another one.
std::string Order::describe(const Where& where) const {
  const auto first = static_cast<unsigned long long>(where.offset), last = first + where.bytes - 1;
  if (where.shared)
    return print("shared bytes %llu to %llu", first, last) +
           (where.region == linear_ ? "" : " of " + cta_name(*cta_->launch, where.region));
  return print("bytes %llu to %llu of buffer %s", first, last, global_->regions[where.region].name);
}

void Order::clash(u32 lane, const char* act, const Access& other, const char* did, const Where& where) const {
  cta_->fault_lane = lane;
  if (other.flags & kByWarpgroup)
    fail("race: %s of %s, which wgmma of warps %u to %u reads (%s); nothing orders the two, and wgmma reads until a "
         "wgmma.wait_group", act, describe(where).c_str(), other.warp, other.warp + 3, place(*cta_, other.pc).c_str());
  const bool copied = other.agent >= warps;
  fail("race: %s of %s, which %s warp %u, lane %u %s%s (%s); nothing orders the two", act, describe(where).c_str(),
       cta_name(*cta_->launch, other.cta).c_str(), other.warp, other.lane,
           copied ? "had copied asynchronously and " : "", did,
       place(*cta_, other.pc).c_str());
}

// Whether the whole warp knows of a list's entries. It never forgets, so that is looked up once for a list.
bool Order::knows_list(u32 warp, const Sharers& sharers, Shadow& shadow) const {
  SharerList& list = shadow.list(sharers);
  const bool own = shadow.by_warp(linear_);
  if (own && (list.known_by >> warp & 1)) return true;
  const Clock& seen = clocks_[warp].common.views[kSeen];
  bool known = true;
  shadow.each(sharers, [&](const Sharers& other) {
    known = known && other.cta == linear_ && seen.knows_all(other.agent, other.time);
  });
  // Memory that CTAs share has other warps of these numbers.
  if (known && own) list.known_by |= 1u << warp;
  return known;
}

void Order::check_sharers(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, const char* act, const Where& where) {
  const char* did = unit.sharers.flags & kStrong ? "accesses atomically" : "reads";
  Access culprit;
  const auto one = [&](const Sharers& sharers) {
    if (sharers.lanes == 0 || ordered(w, lane, sharers, culprit)) return;
    if ((sharers.flags & kStrong) == 0 || !has_looked(w, lane, where)) clash(lane, act, culprit, did, where);
  };
  if (unit.sharers.agent != kMany) return one(unit.sharers);
  if (!knows_list(w.index, unit.sharers, shadow)) shadow.each(unit.sharers, one);
}

// Whether the lane's access can take the place of what others of its warp did, or be one with it. Earlier ones of which
// it knows need not be kept: who knows of it knows of them.
bool Order::joins(const Warp& w, u32 lane, Sharers& other, u32 flags) const {
  const u32 warp = w.index, time = clocks_[warp].time;
  if (other.agent != warp || other.cta != linear_ || other.flags != flags) return false;
  if (other.time == time) {
    other.lanes |= 1u << lane;
    other.pc = w.now;
    return true;
  }
  Access culprit;
  other.lanes &= ~(1u << lane);
  if (other.lanes != 0 && !ordered(w, lane, other, culprit)) return false;
  other = {linear_, static_cast<u16>(warp), static_cast<u16>(flags), 1u << lane, time, w.now};
  return true;
}

// The lane joins those that share the unit: readers, or atomic accesses; of the other kind there may be none unordered.
void Order::share(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, Touch touch, u32 flags, const Where& where) {
  const char* act = touch == Touch::kRead ? "read" : "atomic access";
  const bool strong = (unit.sharers.flags & kStrong) != 0;
  const u32 warp = w.index;
  const Sharers me{linear_, static_cast<u16>(warp), static_cast<u16>(flags), 1u << lane, clocks_[warp].time, w.now};
  Sharers& now = unit.sharers;
  if (strong != (touch == Touch::kStrong)) {
    check_sharers(w, lane, unit, shadow, act, where);
    shadow.drop(now);
    now = me;
    return;
  }
  if (strong) check_scopes(w, lane, unit, shadow, flags, where);
  if (now.agent != kMany) {
    if (joins(w, lane, now, flags)) return;
    Access culprit;
    if (now.lanes == 0 || ordered(w, lane, now, culprit)) {
      now = me;
      return;
    }
    shadow.spread(unit);
  }
  SharerList& list = shadow.list_to_change(now);
  if (shadow.by_warp(linear_)) {
    Sharers place = me;
    if (list.used >> warp & 1) {
      place = shadow.entry(now, warp);
      if (!joins(w, lane, place, flags)) share_beside(list.others, w, lane, me);
    }
    shadow.set_entry(now, place);
  } else {
    share_beside(list.others, w, lane, me);
  }
}

void Order::share_beside(SharerRow& others, const Warp& w, u32 lane, const Sharers& me) const {
  for (Sharers& other : others)
    if (joins(w, lane, other, me.flags)) return;
  others.push_back(me);
}

// Whether a strong access of the CTA, which happens before what the lane does now, has found the last strong write of all
// words: what another thread did there atomically is then ordered, though nothing else that it did is.
bool Order::has_looked(const Warp& w, u32 lane, const Where& where) {
  Order& owner = order_of(where);
  const u64 first = (where.shared ? owner.cta_->shared_base : global_->regions[where.region].begin) + where.offset;
  const auto guard = hold(!where.shared);
  bool any = false;
  for (u64 address = first & ~u64{3}; address < first + where.bytes; address += 4) {
    const SyncPlace* place = nullptr;
    const Look* look = nullptr;
    if (where.shared) {
      SharedPlaces::Row* row = owner.places_.find(address - owner.cta_->shared_base);
      if (row != nullptr) place = &row->place;
      const auto looked = looks_.find(kSharedWindow + address);
      if (row != nullptr && &owner == this)
        look = &row->look;
      else if (looked != looks_.end())
        look = &looked->second;
    } else {
      const auto found = global_->places.find(address);
      if (found != global_->places.end()) place = &found->second;
      const auto looked = looks_.find(address);
      if (looked != looks_.end()) look = &looked->second;
    }
    if (place == nullptr) continue;
    if (look == nullptr || look->version != place->version || !knows(w, lane, kSeen, look->access)) return false;
    any = true;
  }
  return any;
}

// The order of the CTA in whose shared memory some bytes lie.
Order& Order::order_of(const Where& where) const {
  for (Cta* member : cta_->cluster->members)
    if (where.shared && member->linear == where.region) return member->order;
  return cta_->order;
}

bool Order::is_same_store(const Warp& w, const Access& other) const {
  return w.store != 0 && other.store == w.store && other.agent == w.index && other.cta == linear_ && other.pc == w.now;
}

void Order::check_write(const Warp& w, u32 lane, Unit& unit, Touch touch, const Where& where) {
  if (knows(w, lane, kSeen, unit.write)) return;
  if (touch == Touch::kWrite && is_same_store(w, unit.write))
    met = true;
  else
    clash(lane, touch == Touch::kRead ? "read" : touch == Touch::kWrite ? "write" : "atomic access", unit.write,
          "writes", where);
}

// Atomic accesses of two CTAs, of which one has the scope of its CTA only, are a race as well.
void Order::check_scopes(const Warp& w, u32 lane, Unit& unit, Shadow& shadow, u32 flags, const Where& where) const {
  Access culprit;
  const auto one = [&](const Sharers& other) {
    if (other.cta == linear_ || !((flags | other.flags) & kCtaScope)) return;
    if (!ordered(w, lane, other, culprit))
      clash(lane, "atomic access of CTA scope", culprit, "accesses atomically", where);
  };
  if (unit.sharers.agent != kMany) return one(unit.sharers);
  const SharerList& list = shadow.list(unit.sharers);
  for (const Sharers& other : list.others) one(other);
}

// An atomic access of words that have units of their own.
bool Order::quick_strong(const Warp& w, u32 lane, u32 offset, u32 bytes, u32 flags) {
  u32 count;
  Unit* units = bytes > 8 ? nullptr : shadow_->exact(offset, bytes, true, sees_all(w), count);
  if (units == nullptr) return false;
  const u32 time = clocks_[w.index].time;
  for (u32 n = 0; n < count; n++) {
    // Where the lane has done the same before at this time, nothing can have changed: a write would have taken that away.
    Sharers done = units[n].sharers;
    if (done.lanes != 0 && done.agent == kMany && (shadow_->list(done).used >> w.index & 1) != 0)
      done = shadow_->entry(done, w.index);
    const bool again = done.agent == w.index && done.cta == linear_ && done.time == time && done.flags == flags;
    if (again && (done.lanes >> lane & 1) != 0) continue;
    check(w, lane, units[n], *shadow_, Touch::kStrong, flags, {true, linear_, offset, bytes});
  }
  return true;
}

void Order::visit_shared(const Warp& w, u32 lane, u32 offset, u32 bytes, Touch touch, u32 flags) {
  Access mine;
  if (touch == Touch::kWrite) mine = now(w, lane, flags);
  const Where where{true, linear_, offset, bytes};
  shadow_->visit(offset, bytes, touch == Touch::kWrite ? &mine : nullptr, sees_all(w), [&](Unit& unit) {
    check(w, lane, unit, *shadow_, touch, flags, where);
  });
}

// Whether the warp, or the one lane that there is, knows of all that the sharers did.
inline bool Order::all_known(const Sharers& sharers, const Sharers& me, const Clock& seen) const {
  if (sharers.cta != linear_ || sharers.time == kInFlight) return false;
  return seen.knows_all(sharers.agent, sharers.time) || (sharers.agent == me.agent && sharers.lanes == me.lanes);
}

// Adds a reader to those that the warp, or all of its lanes, can be added to as they are.
inline bool Order::quick_read(const Sharers& me, Unit& unit, const Clock& seen) {
  Sharers& now = unit.sharers;
  const auto joins = [&](Sharers& other) {
    if (other.agent != me.agent || other.time != me.time || other.flags != 0 || other.cta != me.cta) return false;
    other.lanes |= me.lanes;
    other.pc = me.pc;
    return true;
  };
  if (now.lanes == 0) {
    now = me;
    return true;
  }
  if ((now.flags & kStrong) != 0) return false;
  if (now.agent != kMany) {
    if (joins(now)) return true;
    if (all_known(now, me, seen)) {
      now = me;
      return true;
    }
    if (now.agent == me.agent) return false;
    shadow_->spread(unit);
  }
  Sharers place = me;
  if (shadow_->list(now).used >> me.agent & 1) {
    place = shadow_->entry(now, me.agent);
    const bool again = place.time == me.time && (me.lanes & ~place.lanes) == 0;
    if (!joins(place)) {
      if (!all_known(place, me, seen)) return false;
      place = me;
    } else if (again) {
      return true;  // nothing new: what is known of the list stays so
    }
  }
  shadow_->list_to_change(now);
  shadow_->set_entry(now, place);
  return true;
}

// Takes the sharers away, where all that they did is known.
inline bool Order::quick_write(const Sharers& me, Sharers& sharers, const Clock& seen) {
  if (sharers.agent != kMany ? !all_known(sharers, me, seen) : !knows_list(me.agent, sharers, *shadow_)) return false;
  shadow_->drop(sharers);
  return true;
}

// A weak access of shared memory, of the kinds that are most of them: whole units, and everything before it is known. False
// where it needs a closer look, which may find some units done already.
bool Order::quick(const Warp& w, u32 lane, u32 offset, u32 bytes, bool write) {
  u32 count;
  Unit* units = shadow_->exact(offset, bytes, write, sees_all(w), count);
  if (units == nullptr) return false;
  const WarpClocks& mine = clocks_[w.index];
  const Clock& seen = mine.common.views[kSeen];
  const Sharers me{linear_, static_cast<u16>(w.index), 0, 1u << lane, mine.time, w.now};
  for (Unit* unit = units; unit != units + count; unit++) {
    const Access& last = unit->write;
    if (last.time != 0) {
      if (last.cta != linear_) return false;
      if (!seen.knows_all(last.agent, last.time) && !(bytes < 16 && last.agent == w.index && last.lane == lane))
        return false;
    }
    Sharers& sharers = unit->sharers;
    if (!write) {
      if (!quick_read(me, *unit, seen)) return false;
      continue;
    }
    if (sharers.lanes != 0 && !quick_write(me, sharers, seen)) return false;
    unit->write = now(w, lane);
  }
  return true;
}

void Order::global(const Warp& w, u32 lane, u32 region, u64 offset, u32 bytes, Touch touch, u32 flags) {
  const Access mine = now(w, lane, flags);
  const Where where{false, region, offset, bytes};
  GlobalOrder::Page& page = global_->page(region, offset / GlobalOrder::kPageBytes);
  std::unique_lock<std::mutex> guard(page.lock, std::defer_lock);
  if (global_->locks) guard.lock();
  page.shadow->visit(static_cast<u32>(offset % GlobalOrder::kPageBytes), bytes,
                    touch == Touch::kWrite ? &mine : nullptr, sees_all(w), [&](Unit& unit) {
    check(w, lane, unit, *page.shadow, touch, flags, where);
  });
}

}  // namespace vm
