// How threads come to know of each other: barriers, fences, and strong accesses of one address.
#include "machine.h"

namespace vm {

void Order::reset(Cta& cta, u32 linear) {
  cta_ = &cta;
  global_ = cta.global;
  linear_ = linear;
  on = global_->on;
  views = global_->views;
  warps = static_cast<u32>(cta.warps.size());
  next_agent_ = 2 * warps;
  if (!on) return;
  clocks_.clear();
  clocks_.resize(warps);
  if (!shadow_) shadow_ = std::make_unique<Shadow>(cta.launch->shared_bytes, warps);
  shadow_->reset();
  places_.clear();
  looked_at_.clear();
}

Knowledge& Order::own(WarpClocks& clocks, u32 lane) {
  std::unique_ptr<Knowledge>& mine = clocks.own[lane];
  if (!mine) mine = std::make_unique<Knowledge>();
  if (!(clocks.own_mask >> lane & 1)) mine->clear();
  clocks.own_mask |= 1u << lane;
  clocks.differs = true;
  return *mine;
}

// Everything that the lanes know and have done so far goes into `into`; what they do from now on does not.
void Order::release(const Warp& w, u32 mask, Knowledge& into) {
  const u32 warp = w.index;
  WarpClocks& mine = clocks_[warp];
  into.merge(linear_, mine.common, linear_);
  for (u32 m = mask & mine.own_mask; m != 0; m &= m - 1) into.merge(linear_, *mine.own[__builtin_ctz(m)], linear_);
  if (mask == w.born && !mine.differs) {
    into.views[kSeen].raise_all(warp, mine.time++);
    return;
  }
  if (mask == w.born)
    into.views[kSeen].raise_all(warp, mine.time);
  else
    for (u32 m = mask; m != 0; m &= m - 1) into.views[kSeen].raise(warp, static_cast<u32>(__builtin_ctz(m)), mine.time);
  each_view([&](View view) {
    for (u32 m = mask; m != 0; m &= m - 1) {
      const u32 lane = static_cast<u32>(__builtin_ctz(m));
      if (view != kSeen && mine.self[view][lane] != 0) into.views[view].raise(warp, lane, mine.self[view][lane]);
      if (mine.waited[view][lane] != 0) into.views[view].raise(warps + warp, lane, mine.waited[view][lane]);
    }
  });
  mine.time++;
}

void Order::acquire(const Warp& w, u32 mask, const Knowledge& from) {
  WarpClocks& mine = clocks_[w.index];
  if (mask == w.live) {
    mine.common.merge(linear_, from, linear_);
    return;
  }
  for (u32 m = mask; m != 0; m &= m - 1) own(mine, static_cast<u32>(__builtin_ctz(m))).merge(linear_, from, linear_);
}

// bar.warp.sync
void Order::meet(const Warp& w, u32 mask) {
  WarpClocks& mine = clocks_[w.index];
  if (mask == w.born && !mine.differs) {
    mine.common.views[kSeen].raise_all(w.index, mine.time++);
    return;
  }
  Knowledge all;
  release(w, mask, all);
  acquire(w, mask, all);
  if (mask == w.live) mine.own_mask = 0;
  // What has been waited for and fenced is in the common clock from now on.
  if (mask == w.born) mine.differs = false;
}

// What the lanes know is from now on known in another way as well.
void Order::promote(const Warp& w, u32 mask, View view) {
  if (!(views >> view & 1)) return;
  WarpClocks& mine = clocks_[w.index];
  mine.differs = true;
  if (mask == w.live) {
    mine.common.views[view].merge(mine.common.views[kSeen]);
    if (mine.common.foreign)
      for (auto& other : *mine.common.foreign) other.second.views[view].merge(other.second.views[kSeen]);
  }
  for (u32 m = mask; m != 0; m &= m - 1) {
    const u32 lane = static_cast<u32>(__builtin_ctz(m));
    mine.self[view][lane] = mine.time;
    mine.waited[view][lane] = mine.waited[kSeen][lane];
    if (mask == w.live && !(mine.own_mask >> lane & 1)) continue;
    Knowledge& known = own(mine, lane);
    if (mask != w.live) {
      known.views[view].merge(mine.common.views[kSeen]);
      if (mine.common.foreign)
        for (auto& other : *mine.common.foreign) {
          Knowledge bare;
          bare.views[view] = other.second.views[kSeen];
          known.merge(linear_, bare, other.first);
        }
    }
    known.views[view].merge(known.views[kSeen]);
    if (known.foreign)
      for (auto& other : *known.foreign) other.second.views[view].merge(other.second.views[kSeen]);
  }
  mine.time++;
}

void Order::fence_proxy(const Warp& w, u32 mask) { promote(w, mask, kProxied); }

namespace {

// What relaxed reads have found happens before from now on: what lies in the CTA, and for a wide fence all.
void settle(Knowledge& known, const Knowledge& found, bool wide) {
  known.views[kSeen].merge(found.views[kPending]);
  if (!wide || !found.foreign) return;
  for (const auto& other : *found.foreign) {
    if (!known.foreign) known.foreign = std::make_unique<std::map<u32, Knowledge>>();
    (*known.foreign)[other.first].views[kSeen].merge(other.second.views[kPending]);
  }
}

}  // namespace

// Scope 0 is the CTA, 1 the device and beyond.
void Order::fence(const Warp& w, u32 mask, u32 scope) {
  if (!synchronises()) return;
  WarpClocks& mine = clocks_[w.index];
  if (mask == w.live) {
    settle(mine.common, mine.common, scope != 0);
    for (u32 m = mask & mine.own_mask; m != 0; m &= m - 1) {
      Knowledge& known = *mine.own[__builtin_ctz(m)];
      settle(known, known, scope != 0);
    }
  } else {
    for (u32 m = mask; m != 0; m &= m - 1) {
      Knowledge& known = own(mine, static_cast<u32>(__builtin_ctz(m)));
      settle(known, known, scope != 0);
      settle(known, mine.common, scope != 0);
    }
  }
  promote(w, mask, kPublishedCta);
  if (scope != 0) promote(w, mask, kPublished);
}

// A strong read of an address: what strong writes have left there is acquired, or found and waits for a fence.
void Order::find(const Warp& w, u32 lane, bool global, u64 address, Semantics semantics, u32 scope) {
  std::unique_lock<std::mutex> guard(global_->lock, std::defer_lock);
  if (global && global_->locks) guard.lock();
  auto& places = global ? global_->places : places_;
  const auto found = places.find(address);
  if (found == places.end()) return;
  looked_at_[address] = {now(w, lane), found->second.version};
  WarpClocks& mine = clocks_[w.index];
  const bool acquires = semantics == Semantics::kAcquire || semantics == Semantics::kBoth;
  const auto take = [&](const std::map<u32, Knowledge>& all) {
    for (const auto& [cta, left] : all) {
      Knowledge bare;
      bare.views[acquires ? kSeen : kPending] = left.views[kSeen];
      own(mine, lane).merge(linear_, bare, cta);
    }
  };
  if (scope != 0 || !global) take(found->second.wide);
  const auto narrow = found->second.narrow.find(linear_);
  if (narrow != found->second.narrow.end()) take(narrow->second);
}

// A strong write: what it releases, or what a fence has released before it, lies at the address from now on. A store
// replaces what was there; an atomic operation adds to it.
void Order::leave(const Warp& w, u32 lane, bool global, u64 address, Semantics semantics, u32 scope, bool replaces) {
  const bool releases = semantics == Semantics::kRelease || semantics == Semantics::kBoth;
  const bool wide = scope != 0 && global;
  Knowledge known;
  const WarpClocks& mine = clocks_[w.index];
  const u32 time = mine.time;
  release(w, 1u << lane, known);
  clocks_[w.index].time = releases ? time + 1 : time;
  std::unique_lock<std::mutex> guard(global_->lock, std::defer_lock);
  if (global && global_->locks) guard.lock();
  auto& places = global ? global_->places : places_;
  SyncPlace& place = places[address];
  const u64 version = place.version + 1;
  if (replaces) place = SyncPlace();
  place.version = version;
  looked_at_[address] = {now(w, lane), version};
  const auto put = [&](std::map<u32, Knowledge>& to, View view) {
    if (!known.views[view].empty()) to[linear_].views[kSeen].merge(known.views[view]);
    if (known.foreign)
      for (const auto& other : *known.foreign)
        if (!other.second.views[view].empty()) to[other.first].views[kSeen].merge(other.second.views[view]);
  };
  if (wide) put(place.wide, releases ? kSeen : kPublished);
  put(place.narrow[linear_], releases ? kSeen : kPublishedCta);
}

// ---- 16-byte copies ----

void Order::wait_copies(const Warp& w, u32 lane, u32 count) {
  u32& waited = clocks_[w.index].waited[kSeen][lane];
  waited = std::max(waited, count);
  clocks_[w.index].differs = true;
}

void Order::release_copies(u32 warp, u32 lane, u32 count, Knowledge& into) const {
  if (count != 0) into.views[kSeen].raise(warps + warp, lane, count);
}

}  // namespace vm
