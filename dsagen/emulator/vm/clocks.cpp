// Clocks, and how they are joined; see order.h.
#include <algorithm>

#include "machine.h"

namespace vm {

void Clock::grow(size_t agents) {
  if (agents <= all_.size()) return;
  all_.resize(agents);
  wide_.resize(agents);
}

LaneTimes& Clock::widened(u32 agent) {
  if (wide_[agent] == 0) {
    LaneTimes times;
    times.fill(all_[agent]);
    lanes_.push_back(times);
    wide_[agent] = static_cast<u16>(lanes_.size());
  }
  return lanes_[wide_[agent] - 1];
}

// Lanes' own times go once all lanes have come as far, so that clocks stay short.
void Clock::narrow(u32 agent) {
  const u32 at = wide_[agent];
  const LaneTimes& times = lanes_[at - 1];
  if (*std::max_element(times.begin(), times.end()) > all_[agent]) return;
  const u32 last = static_cast<u32>(lanes_.size());
  if (at != last) {
    lanes_[at - 1] = lanes_[last - 1];
    *std::find(wide_.begin(), wide_.end(), last) = static_cast<u16>(at);
  }
  lanes_.pop_back();
  wide_[agent] = 0;
}

void Clock::raise_all(u32 agent, u32 time) {
  grow(agent + 1);
  all_[agent] = std::max(all_[agent], time);
  if (wide_[agent] != 0) narrow(agent);
}

void Clock::raise(u32 agent, u32 lane, u32 time) {
  grow(agent + 1);
  if (time <= all_[agent]) return;
  u32& own = widened(agent)[lane];
  own = std::max(own, time);
}

void Clock::merge(const Clock& other) {
  const size_t count = other.all_.size();
  grow(count);
  for (size_t n = 0; n < count; n++) all_[n] = std::max(all_[n], other.all_[n]);
  if (!lanes_.empty())
    for (u32 n = 0; n < count; n++)
      if (wide_[n] != 0) narrow(n);
  if (other.lanes_.empty()) return;
  for (size_t n = 0; n < count; n++) {
    if (other.wide_[n] == 0) continue;
    const LaneTimes& theirs = other.lanes_[other.wide_[n] - 1];
    if (*std::max_element(theirs.begin(), theirs.end()) <= all_[n]) continue;
    LaneTimes& ours = widened(static_cast<u32>(n));
    for (int l = 0; l < kLanes; l++) ours[l] = std::max(ours[l], theirs[l]);
    all_[n] = std::max(all_[n], *std::min_element(ours.begin(), ours.end()));
  }
}

bool Clock::covers(const Clock& other) const {
  const size_t count = other.all_.size();
  if (count > all_.size()) return false;
  u32 behind = 0;
  for (size_t n = 0; n < count; n++) behind |= all_[n] < other.all_[n];
  if (behind != 0) return false;
  if (other.lanes_.empty()) return true;
  for (u32 n = 0; n < count; n++) {
    if (other.wide_[n] == 0) continue;
    const LaneTimes& theirs = other.lanes_[other.wide_[n] - 1];
    for (u32 l = 0; l < kLanes; l++)
      if (theirs[l] != 0 && !knows(n, l, theirs[l])) return false;
  }
  return true;
}

void Clock::clear() {
  all_.clear();
  wide_.clear();
  lanes_.clear();
}

namespace {

bool covers(const Clock (&to)[kViews], const Clock (&from)[kViews]) {
  for (u32 v = 0; v < kViews; v++)
    if (!from[v].empty() && !to[v].covers(from[v])) return false;
  return true;
}

void join(Clock (&to)[kViews], const Clock (&from)[kViews]) {
  for (u32 v = 0; v < kViews; v++)
    if (!from[v].empty() && !to[v].covers(from[v])) to[v].merge(from[v]);
}

}  // namespace

std::map<u32, Knowledge>& Knowledge::own_foreign() {
  // Only threads of one CTA have one in common, and these run on one thread of the host.
  if (!foreign)
    foreign = std::make_shared<std::map<u32, Knowledge>>();
  else if (foreign.use_count() > 1)
    foreign = std::make_shared<std::map<u32, Knowledge>>(*foreign);
  return *foreign;
}

const Knowledge* Knowledge::of(u32 cta) const {
  if (!foreign) return nullptr;
  const auto found = foreign->find(cta);
  return found == foreign->end() ? nullptr : &found->second;
}

void Knowledge::merge(u32 home, const Knowledge& other, u32 other_home) {
  const auto take = [&](u32 cta, const Knowledge& known) {
    if (cta == home) return join(views, known.views);
    const Knowledge* there = of(cta);
    if (there != nullptr && covers(there->views, known.views)) return;
    join(own_foreign()[cta].views, known.views);
  };
  take(other_home, other);
  if (!other.foreign || other.foreign == foreign) return;
  if (!foreign && other_home == home) {
    foreign = other.foreign;
    return;
  }
  for (const auto& [cta, known] : *other.foreign) take(cta, known);
}

// Takes over what contains all that is known here already.
void Knowledge::assign(const Knowledge& other) {
  for (u32 v = 0; v < kViews; v++) views[v] = other.views[v];
  if (other.foreign) foreign = other.foreign;
}

void Knowledge::learn(u32 home, u32 cta, View view, const Clock& clock) {
  const Knowledge* there = cta == home ? this : of(cta);
  if (clock.empty() || (there != nullptr && there->views[view].covers(clock))) return;
  (cta == home ? *this : own_foreign()[cta]).views[view].merge(clock);
}

void Knowledge::see_in(View view) {
  views[view].merge(views[kSeen]);
  if (!foreign) return;
  for (const auto& [cta, known] : *foreign)
    if (!known.views[view].covers(known.views[kSeen])) {
      for (auto& other : own_foreign()) other.second.views[view].merge(other.second.views[kSeen]);
      return;
    }
}

void Knowledge::clear() {
  for (Clock& clock : views) clock.clear();
  foreign.reset();
}

bool Knowledge::knows(u32 home, View view, u32 cta, u32 agent, u32 lane, u32 time) const {
  if (cta == home) return views[view].knows(agent, lane, time);
  const Knowledge* there = of(cta);
  return there != nullptr && there->views[view].knows(agent, lane, time);
}

}  // namespace vm
