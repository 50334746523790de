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
  next_agent_ = (global_->has_groups ? 4 : 2) * warps;
  first_warpgroup_ = next_agent_;
  next_agent_ += warps / kGroupWarps;
  if (!on) return;
  clocks_.resize(warps);
  for (WarpClocks& clocks : clocks_) clocks.reset();
  if (!shadow_) shadow_ = take_shadow(cta.launch->shared_bytes, warps);
  shadow_->reset(linear_);
  places_.reset(synchronises() ? cta.launch->shared_bytes : 0);
  looks_.clear();
  exits_.clear();
  visitors_.clear();
}

void WarpClocks::reset() {
  differs = false;
  time = 1;
  common.clear();
  own_mask = 0;
  issued.fill(0);
  for (u32 v = 0; v < kViews; v++) waited[v].fill(0), self[v].fill(0);
}

SharedPlaces::Row* SharedPlaces::find(u64 offset) {
  const u64 word = offset / 4;
  if (word >= first_.size()) return nullptr;  // nothing synchronises here
  for (u32 row = first_[word]; row != 0; row = rows_[row - 1].next)
    if (rows_[row - 1].offset == offset) return &rows_[row - 1];
  return nullptr;
}

SharedPlaces::Row& SharedPlaces::at(u64 offset) {
  if (Row* found = find(offset)) return *found;
  if (used_ == rows_.size()) rows_.emplace_back();
  Row& row = rows_[used_++];
  row.offset = offset;
  row.place.version = 0;
  row.place.wide.clear();
  row.place.narrow.clear();
  row.look = {};
  u32& first = first_[offset / 4];
  row.next = first;
  first = used_;
  return row;
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

void Order::release(const Warp& w, u32 mask, Knowledge& into, u32 home) {
  Knowledge mine;
  release(w, mask, mine);
  into.merge(home, mine, linear_);
}

void Order::acquire(const Warp& w, u32 mask, const Knowledge& from, u32 home) {
  Knowledge found;
  found.merge(linear_, from, home);
  acquire(w, mask, found);
}

void Order::release_published(const Warp& w, u32 mask, Knowledge& into, u32 home) {
  // That the CTA has started is known in any case.
  Knowledge started;
  started.views[kSeen].raise_all(0, 0);
  into.merge(home, started, linear_);
  for (u32 m = mask; m != 0; m &= m - 1) {
    const u32 lane = static_cast<u32>(__builtin_ctz(m));
    std::map<u32, Clock> published;
    if (synchronises() && knows_anything(w, lane, kPublished)) put(w, lane, kPublished, published);
    for (const auto& [cta, known] : published) into.learn(home, cta, kSeen, known);
  }
}

bool Order::knows_of(const Warp& w, u32 lane, u32 cta) const {
  const WarpClocks& mine = clocks_[w.index];
  const auto has = [cta](const Knowledge& known) { return known.foreign && known.foreign->count(cta) != 0; };
  return has(mine.common) || ((mine.own_mask >> lane & 1) && has(*mine.own[lane]));
}

void Order::acquire_all(const Warp& w, const Knowledge& from) {
  WarpClocks& mine = clocks_[w.index];
  mine.common.assign(from);
  mine.own_mask = 0;
  if (w.live == w.born) mine.differs = false;
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
  if (mask == w.live) mine.common.see_in(view);
  for (u32 m = mask; m != 0; m &= m - 1) {
    const u32 lane = static_cast<u32>(__builtin_ctz(m));
    mine.self[view][lane] = mine.time;
    mine.waited[view][lane] = mine.waited[kSeen][lane];
    if (mask == w.live && !(mine.own_mask >> lane & 1)) continue;
    Knowledge& known = own(mine, lane);
    if (mask != w.live) {
      known.views[view].merge(mine.common.views[kSeen]);
      if (mine.common.foreign)
        for (const auto& other : *mine.common.foreign)
          known.learn(linear_, other.first, view, other.second.views[kSeen]);
    }
    known.see_in(view);
  }
  mine.time++;
}

void Order::fence_proxy(const Warp& w, u32 mask) { promote(w, mask, kProxied); }

namespace {

// What relaxed reads have found happens before from now on: what lies in the CTA, and for a wide fence all.
void settle(u32 home, Knowledge& known, const Knowledge& found, bool wide) {
  known.views[kSeen].merge(found.views[kPending]);
  if (!wide || !found.foreign) return;
  const auto all = found.foreign;  // which may be `known`'s own
  for (const auto& other : *all) known.learn(home, other.first, kSeen, other.second.views[kPending]);
}

}  // namespace

// Scope 0 is the CTA, 1 the device and beyond.
void Order::fence(const Warp& w, u32 mask, u32 scope) {
  if (!synchronises()) return;
  WarpClocks& mine = clocks_[w.index];
  if (mask == w.live) {
    settle(linear_, mine.common, mine.common, scope != 0);
    for (u32 m = mask & mine.own_mask; m != 0; m &= m - 1) {
      Knowledge& known = *mine.own[__builtin_ctz(m)];
      settle(linear_, known, known, scope != 0);
    }
  } else {
    for (u32 m = mask; m != 0; m &= m - 1) {
      Knowledge& known = own(mine, static_cast<u32>(__builtin_ctz(m)));
      settle(linear_, known, known, scope != 0);
      settle(linear_, known, mine.common, scope != 0);
    }
  }
  promote(w, mask, kPublishedCta);
  if (scope != 0) promote(w, mask, kPublished);
}

// A strong read of an address: what strong writes have left there is acquired, or found and waits for a fence.
void Order::find(const Warp& w, u32 lane, Order* owner, u64 address, Semantics semantics, u32 scope) {
  const bool global = owner == nullptr;
  const auto guard = hold(global);
  const SyncPlace* place = nullptr;
  if (global) {
    const auto found = global_->places.find(address);
    if (found == global_->places.end()) return;
    place = &found->second;
    looks_[address] = {now(w, lane), place->version};
  } else {
    SharedPlaces::Row* row = owner->places_.find(address - owner->cta_->shared_base);
    if (row == nullptr) return;
    place = &row->place;
    // By a reference: g++ 12 makes what is in a braced list for one side only of a conditional that is assigned to.
    Look& look = owner == this ? row->look : looks_[kSharedWindow + address];
    look = {now(w, lane), place->version};
  }
  WarpClocks& mine = clocks_[w.index];
  const bool acquires = semantics == Semantics::kAcquire || semantics == Semantics::kBoth;
  const auto take = [&](const std::map<u32, Clock>& all) {
    for (const auto& [cta, left] : all) {
      // What the whole warp has seen needs neither.
      const Knowledge* common = cta == linear_ ? &mine.common : mine.common.of(cta);
      if (common != nullptr && common->views[kSeen].covers(left)) continue;
      own(mine, lane).learn(linear_, cta, acquires ? kSeen : kPending, left);
    }
  };
  if (scope != 0) take(place->wide);
  const auto narrow = place->narrow.find(linear_);
  if (narrow != place->narrow.end()) take(narrow->second);
}

// A strong write: what it releases, or what a fence has released before it, lies at the address from now on. A store
// replaces what was there; an atomic operation adds to it.
void Order::leave(const Warp& w, u32 lane, Order* owner, u64 address, Semantics semantics, u32 scope, bool replaces) {
  const bool releases = semantics == Semantics::kRelease || semantics == Semantics::kBoth;
  const bool global = owner == nullptr;
  const bool wide = scope != 0 && (global || cta_->cluster->members.size() > 1);
  const auto guard = hold(global);
  SharedPlaces::Row* row = global ? nullptr : &owner->places_.at(address - owner->cta_->shared_base);
  SyncPlace& place = global ? global_->places[address] : row->place;
  if (replaces) {
    place.wide.clear();
    place.narrow.clear();
  }
  place.version++;
  if (wide) put(w, lane, releases ? kSeen : kPublished, place.wide);
  const View view = releases ? kSeen : kPublishedCta;
  if (knows_anything(w, lane, view)) put(w, lane, view, place.narrow[linear_]);
  if (releases) clocks_[w.index].time++;
  Look& look = owner == this ? row->look : looks_[global ? address : kSharedWindow + address];
  look = {now(w, lane), place.version};
}

// Whether a lane has anything that it could leave.
bool Order::knows_anything(const Warp& w, u32 lane, View view) const {
  const WarpClocks& mine = clocks_[w.index];
  return view == kSeen || mine.self[view][lane] != 0 || mine.waited[view][lane] != 0 || (mine.own_mask >> lane & 1) ||
         !mine.common.views[view].empty() || mine.common.foreign;
}

// What a lane knows and has done, in a view, to what lies at an address, by CTA.
void Order::put(const Warp& w, u32 lane, View view, std::map<u32, Clock>& to) const {
  const WarpClocks& mine = clocks_[w.index];
  const auto add = [&](u32 cta, const Clock& known) {
    if (known.empty()) return;
    Clock& there = to[cta];
    if (!there.covers(known)) there.merge(known);
  };
  const auto add_all = [&](const Knowledge& known) {
    add(linear_, known.views[view]);
    if (known.foreign)
      for (const auto& other : *known.foreign) add(other.first, other.second.views[view]);
  };
  add_all(mine.common);
  if (mine.own_mask >> lane & 1) add_all(*mine.own[lane]);
  const u32 done = view == kSeen ? mine.time : mine.self[view][lane], copied = mine.waited[view][lane];
  if (done != 0) to[linear_].raise(w.index, lane, done);
  if (copied != 0) to[linear_].raise(warps + w.index, lane, copied);
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
