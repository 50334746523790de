// What is kept of memory: units of 16, 4 or 1 bytes; see order.h.
#include <cstdlib>

#include "machine.h"

namespace vm {
Shadow::Shadow(u32 bytes, u32 warps) : warps_(warps), levels_((bytes + 15) / 16) {
  // Never read before split() has cleared it.
  units_ = static_cast<Unit*>(std::calloc(std::max<size_t>(levels_.size() * 4, 1), sizeof(Unit)));
  if (units_ == nullptr) throw Fault{"out of memory for the shadow of memory"};
}

Shadow::~Shadow() { std::free(units_); }

void Shadow::reset() {
  std::fill(levels_.begin(), levels_.end(), 0);
  bytes_units_.clear();
  free_lists_.clear();
  for (u32 n = 0; n < lists_.size(); n++) free_list(n);
}

void Shadow::free_list(u32 list) {
  std::fill(lists_[list].by_warp.begin(), lists_[list].by_warp.end(), Sharers{});
  lists_[list].others.clear();
  free_lists_.push_back(list);
}

void Shadow::spread(Unit& unit) {
  if (free_lists_.empty()) {
    free_lists_.push_back(static_cast<u32>(lists_.size()));
    lists_.emplace_back();
    lists_.back().by_warp.resize(warps_);
  }
  const u32 list = free_lists_.back();
  free_lists_.pop_back();
  if (unit.sharers.agent < warps_)
    lists_[list].by_warp[unit.sharers.agent] = unit.sharers;
  else
    lists_[list].others.push_back(unit.sharers);
  unit.sharers = {0, kMany, unit.sharers.flags, kFullMask, list, 0};
}

Unit Shadow::copied(const Unit& unit) {
  Unit out = unit;
  if (unit.sharers.lanes != 0 && unit.sharers.agent == kMany) {
    const u32 from = unit.sharers.time;
    out.sharers = {};
    spread(out);
    lists_[out.sharers.time] = lists_[from];
    out.sharers.flags = unit.sharers.flags;
  }
  return out;
}

// Makes the units of 16 bytes finer.
void Shadow::split(u32 granule, u32 level) {
  u32& now = levels_[granule];
  Unit* words = units_ + 4 * granule;
  if (now == 0) {
    for (int n = 0; n < 4; n++) words[n] = Unit{};
    now = level == kWhole ? u32{kWhole} : u32{kWords};
  }
  if (now == kWhole && level >= kWords) {
    for (int n = 1; n < 4; n++) words[n] = copied(words[0]);
    now = kWords;
  }
  if (now == kWords && level >= kBytes) {
    std::array<Unit, 16> units;
    for (int n = 0; n < 16; n++) units[n] = copied(words[n / 4]);
    for (int n = 0; n < 4; n++) drop(words[n].sharers);
    bytes_units_.push_back(units);
    now = kBytes + static_cast<u32>(bytes_units_.size()) - 1;
  }
}

// Takes four words as one where a warp has written them at one time and nobody has accessed them since. Who wrote which
// stays in their units.
void Shadow::merge(u32 granule) {
  const Unit* words = units_ + 4 * granule;
  for (int n = 0; n < 4; n++) {
    const Access &a = words[0].write, &b = words[n].write;
    if (words[n].sharers.lanes != 0 || a.cta != b.cta || a.agent != b.agent || a.time != b.time || a.flags != b.flags)
      return;
  }
  levels_[granule] = kMerged;
}

void Shadow::unmerge(u32 granule) {
  Unit* words = units_ + 4 * granule;
  for (int n = 1; n < 4; n++) words[n].sharers = copied(words[0]).sharers;
  levels_[granule] = kWords;
}

void Shadow::collapse(u32 granule, const Access& written) {
  const u32 level = levels_[granule];
  if (level >= kBytes)
    for (Unit& unit : bytes_units_[level - kBytes]) drop(unit.sharers);
  else
    for (u32 n = 0; n < (level == kWords ? 4u : 1u); n++) drop(units_[4 * granule + n].sharers);
  levels_[granule] = kWhole;
  units_[4 * granule] = Unit{written, {}};
}

namespace {

// Views that an instruction makes differ from kSeen, so that kernels without fences do not pay for them.
u32 views_told_apart(const Ins& i) {
  constexpr u32 kStrongViews = 1u << kPublished | 1u << kLocal | 1u << kPending;
  const std::string name = handlers()[i.op].first;
  if (name == "copy_bulk") return 1u << kProxied;
  if (name == "fence") return kStrongViews;
  const bool access = name == "ld" || name == "st" || name == "atom";
  return access && (i.flags >> 13 & 7) > static_cast<u32>(Semantics::kRelaxed) ? kStrongViews : 0;
}

}  // namespace

GlobalOrder::GlobalOrder(const Launch& launch, const std::vector<Region>& all) : regions(all) {
  on = launch.races != 0;
  locks = launch.os_threads > 1;
  for (u32 n = 0; n < launch.instructions; n++) views |= views_told_apart(launch.code[n]);
  pages_.resize(regions.size());
  for (size_t n = 0; n < regions.size(); n++)
    if (on && regions[n].writable) pages_[n].resize((regions[n].end - regions[n].begin + kPageBytes - 1) / kPageBytes);
}

GlobalOrder::Page& GlobalOrder::page(u32 region, u64 number) {
  std::unique_lock<std::mutex> guard(lock, std::defer_lock);
  if (locks) guard.lock();
  std::unique_ptr<Page>& found = pages_[region][number];
  if (!found) found = std::make_unique<Page>();
  return *found;
}

}  // namespace vm
