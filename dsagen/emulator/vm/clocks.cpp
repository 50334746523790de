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

void join(Clock (&to)[kViews], const Clock (&from)[kViews]) {
  for (u32 v = 0; v < kViews; v++)
    if (!from[v].empty() && !to[v].covers(from[v])) to[v].merge(from[v]);
}

}  // namespace

void Knowledge::merge(u32 home, const Knowledge& other, u32 other_home) {
  const auto of_cta = [&](u32 cta) -> Knowledge& {
    if (cta == home) return *this;
    if (!foreign) foreign = std::make_unique<std::map<u32, Knowledge>>();
    return (*foreign)[cta];
  };
  join(of_cta(other_home).views, other.views);
  if (!other.foreign) return;
  for (const auto& [cta, known] : *other.foreign) join(of_cta(cta).views, known.views);
}

// Takes over what contains all that is known here already.
void Knowledge::assign(const Knowledge& other) {
  for (u32 v = 0; v < kViews; v++) views[v] = other.views[v];
  if (!other.foreign) return;
  if (!foreign) foreign = std::make_unique<std::map<u32, Knowledge>>();
  for (const auto& [cta, known] : *other.foreign) (*foreign)[cta].assign(known);
}

void Knowledge::clear() {
  for (Clock& clock : views) clock.clear();
  foreign.reset();
}

bool Knowledge::knows(u32 home, View view, u32 cta, u32 agent, u32 lane, u32 time) const {
  if (cta == home) return views[view].knows(agent, lane, time);
  if (!foreign) return false;
  const auto found = foreign->find(cta);
  return found != foreign->end() && found->second.views[view].knows(agent, lane, time);
}

}  // namespace vm
