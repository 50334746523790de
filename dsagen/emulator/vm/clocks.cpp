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

void Clock::raise_all(u32 agent, u32 time) {
  grow(agent + 1);
  all_[agent] = std::max(all_[agent], time);
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
  if (other.lanes_.empty()) return;
  for (size_t n = 0; n < count; n++) {
    if (other.wide_[n] == 0) continue;
    const LaneTimes& theirs = other.lanes_[other.wide_[n] - 1];
    LaneTimes& ours = widened(static_cast<u32>(n));
    for (int l = 0; l < kLanes; l++) ours[l] = std::max(ours[l], theirs[l]);
    all_[n] = std::max(all_[n], *std::min_element(ours.begin(), ours.end()));
  }
}

void Clock::clear() {
  all_.clear();
  wide_.clear();
  lanes_.clear();
}

void Knowledge::merge(u32 home, const Knowledge& other, u32 other_home) {
  if (home == other_home) {
    for (u32 v = 0; v < kViews; v++)
      if (!other.views[v].empty()) views[v].merge(other.views[v]);
  } else {
    if (!foreign) foreign = std::make_unique<std::map<u32, Knowledge>>();
    Knowledge& theirs = (*foreign)[other_home];
    for (u32 v = 0; v < kViews; v++)
      if (!other.views[v].empty()) theirs.views[v].merge(other.views[v]);
  }
  if (!other.foreign) return;
  for (const auto& [cta, known] : *other.foreign) {
    Knowledge bare;
    for (u32 v = 0; v < kViews; v++) bare.views[v] = known.views[v];
    merge(home, bare, cta);
  }
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
