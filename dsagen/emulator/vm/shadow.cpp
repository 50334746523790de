// What is kept of memory: units of 16, 4 or 1 bytes; see shadow.h.
#include <cstdlib>

#include "machine.h"

namespace vm {
namespace {

// Shadows that no launch uses. Never destroyed, for threads may end later than the process's other objects.
constexpr size_t kMostKeptBytes = size_t{64} << 20;
struct Kept {
  std::mutex lock;
  std::vector<Shadow*> all;
  size_t bytes = 0;
};
Kept& kept() {
  static Kept* const out = new Kept;
  return *out;
}

}  // namespace

// Nobody waits for the lock: what has forked while another thread held it would do so for ever.
KeptShadow take_shadow(u32 bytes, u32 warps) {
  Kept& from = kept();
  const std::unique_lock<std::mutex> guard(from.lock, std::try_to_lock);
  if (guard.owns_lock())
    for (size_t n = from.all.size(); n-- != 0;) {
      Shadow* const found = from.all[n];
      if (!found->fits(bytes, warps)) continue;
      from.all.erase(from.all.begin() + static_cast<std::ptrdiff_t>(n));
      from.bytes -= found->held_bytes();
      found->reset(0);
      return KeptShadow(found);
    }
  return KeptShadow(new Shadow(bytes, warps));
}

void GiveBack::operator()(Shadow* shadow) const {
  Kept& to = kept();
  const size_t bytes = shadow->held_bytes();
  const std::unique_lock<std::mutex> guard(to.lock, std::try_to_lock);
  if (!guard.owns_lock() || bytes > kMostKeptBytes) {
    delete shadow;
    return;
  }
  to.all.push_back(shadow);
  to.bytes += bytes;
  // Those go that nobody has wanted for longest.
  size_t gone = 0;
  for (; to.bytes > kMostKeptBytes; gone++) {
    to.bytes -= to.all[gone]->held_bytes();
    delete to.all[gone];
  }
  to.all.erase(to.all.begin(), to.all.begin() + static_cast<std::ptrdiff_t>(gone));
}

size_t Shadow::held_bytes() const {
  return levels_.size() * (sizeof(u32) + sizeof(Unit)) + words_.capacity() * sizeof words_[0] +
         byte_units_.capacity() * sizeof byte_units_[0] + entries_.capacity() * sizeof(Entry) +
         lists_.capacity() * sizeof(SharerList);
}

Shadow::Shadow(u32 bytes, u32 warps) : warps_(warps), levels_((bytes + 15) / 16) {
  // Never read before split() has cleared it.
  wholes_ = static_cast<Unit*>(std::calloc(std::max<size_t>(levels_.size(), 1), sizeof(Unit)));
  if (wholes_ == nullptr) throw Fault{"out of memory for the shadow of memory"};
}

Shadow::~Shadow() { std::free(wholes_); }

void Shadow::reset(u32 owner) {
  owner_ = owner;
  std::fill(levels_.begin(), levels_.end(), 0);
  words_.clear();
  byte_units_.clear();
  free_words_.clear();
  free_bytes_.clear();
  free_lists_.clear();
  for (u32 n = 0; n < lists_.size(); n++) free_list(n);
}

// ---- lists of sharers ----

void Shadow::free_list(u32 list) {
  lists_[list].used = 0;
  lists_[list].others.clear();
  free_lists_.push_back(list);
}

u32 Shadow::new_list() {
  if (free_lists_.empty()) {
    free_lists_.push_back(static_cast<u32>(lists_.size()));
    lists_.emplace_back();
    entries_.resize(lists_.size() * warps_);
  }
  const u32 list = free_lists_.back();
  free_lists_.pop_back();
  lists_[list].units = 1;
  lists_[list].known_by = 0;
  return list;
}

void Shadow::spread(Unit& unit) {
  const Sharers one = unit.sharers;
  unit.sharers = {0, kMany, one.flags, kFullMask, new_list(), 0};
  if (one.agent < warps_ && one.cta == owner_) {
    set_entry(unit.sharers, one);
    return;
  }
  list(unit.sharers).others.push_back(one);
}

// Gives the sharers a list of their own, which is as the one that they have with others.
void Shadow::take_list(Sharers& sharers) {
  const u32 from = sharers.time;
  sharers.time = new_list();
  SharerList &mine = list(sharers), &old = lists_[from];
  mine.used = old.used;
  for (u32 m = old.used; m != 0; m &= m - 1) {
    const u32 warp = static_cast<u32>(__builtin_ctz(m));
    entries_[sharers.time * warps_ + warp] = entries_[from * warps_ + warp];
  }
  mine.others = old.others;
  old.units--;
}

// ---- units ----

Unit Shadow::copied(const Unit& unit) {
  if (unit.sharers.lanes != 0 && unit.sharers.agent == kMany) list(unit.sharers).units++;
  return unit;
}

u32 Shadow::new_words() {
  if (free_words_.empty()) {
    free_words_.push_back(static_cast<u32>(words_.size()));
    words_.emplace_back();
  }
  const u32 out = free_words_.back();
  free_words_.pop_back();
  return out;
}

void Shadow::free_words(u32 granule) {
  const u32 at = levels_[granule] / kKinds;
  for (Unit& unit : words_[at]) drop(unit.sharers);
  free_words_.push_back(at);
}

// Makes the units of 16 bytes finer.
void Shadow::split(u32 granule, u32 wanted) {
  u32& level = levels_[granule];
  if (level == kUntouched) {
    wholes_[granule] = Unit{};
    level = kWhole;
  }
  if (level == kWhole && wanted >= kWords) {
    const u32 at = new_words();
    for (u32 n = 0; n < 4; n++) {
      words_[at][n] = copied(wholes_[granule]);
      words_[at][n].write = word_of(wholes_[granule].write, n);
    }
    drop(wholes_[granule].sharers);
    level = kWords + kKinds * at;
  }
  if ((level & kKind) == kWords && wanted >= kBytes) {
    if (free_bytes_.empty()) {
      free_bytes_.push_back(static_cast<u32>(byte_units_.size()));
      byte_units_.emplace_back();
    }
    const u32 at = free_bytes_.back();
    free_bytes_.pop_back();
    for (int n = 0; n < 16; n++) byte_units_[at][n] = copied(words_[level / kKinds][n / 4]);
    free_words(granule);
    level = kBytes + kKinds * at;
  }
}

// Takes four words as one where a warp has written them at one time and nobody has accessed them since. Who wrote which
// stays in their units.
void Shadow::merge(u32 granule) {
  u32& level = levels_[granule];
  const std::array<Unit, 4>& words = words_[level / kKinds];
  for (int n = 0; n < 4; n++) {
    const Access &a = words[0].write, &b = words[n].write;
    if (words[n].sharers.lanes != 0 || a.cta != b.cta || a.agent != b.agent || a.time != b.time || a.flags != b.flags)
      return;
  }
  wholes_[granule] = words[0];
  level += kMerged - kWords;
}

void Shadow::unmerge(u32 granule) {
  u32& level = levels_[granule];
  for (Unit& word : words_[level / kKinds]) word.sharers = copied(wholes_[granule]).sharers;
  drop(wholes_[granule].sharers);
  level += kWords - kMerged;
}

void Shadow::collapse(u32 granule, const Access& written) {
  u32& level = levels_[granule];
  if ((level & kKind) == kWords) {
    free_words(granule);
  } else {
    for (Unit& unit : byte_units_[level / kKinds]) drop(unit.sharers);
    free_bytes_.push_back(level / kKinds);
  }
  level = kWhole;
  wholes_[granule] = Unit{written, {}};
}

namespace {

// Views that an instruction makes differ from kSeen, so that kernels without fences do not pay for them.
u32 views_told_apart(const Ins& i) {
  constexpr u32 kStrongViews = 1u << kPublished | 1u << kPublishedCta | 1u << kPending;
  const std::string name = handlers()[i.op].first;
  if (name.rfind("copy_bulk", 0) == 0 || name.rfind("wgmma_", 0) == 0) return 1u << kProxied;
  if (name == "fence") return kStrongViews;
  const bool access = name == "ld" || name == "st" || name == "atom";
  return access && (i.flags >> 13 & 7) > static_cast<u32>(Semantics::kRelaxed) ? kStrongViews : 0;
}

}  // namespace

GlobalOrder::GlobalOrder(const Launch& launch, const std::vector<Region>& all) : regions(all) {
  on = launch.races != 0;
  locks = launch.os_threads > 1;
  for (u32 n = 0; n < launch.instructions; n++) {
    views |= views_told_apart(launch.code[n]);
    const std::string name = handlers()[launch.code[n].op].first;
    has_groups |= name == "copy_bulk_store" || name == "copy_bulk_tensor_store";
  }
  pages_.resize(regions.size());
  for (size_t n = 0; n < regions.size(); n++)
    if (on && regions[n].writable) pages_[n].resize((regions[n].end - regions[n].begin + kPageBytes - 1) / kPageBytes);
}

GlobalOrder::Page& GlobalOrder::page(u32 region, u64 number) {
  std::unique_lock<std::recursive_mutex> guard(lock, std::defer_lock);
  if (locks) guard.lock();
  std::unique_ptr<Page>& found = pages_[region][number];
  if (!found) found = std::make_unique<Page>();
  return *found;
}

}  // namespace vm
