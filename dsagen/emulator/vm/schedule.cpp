// Whose turn it is: CTAs on OS threads, warps of a CTA; and what is said when nobody can go on.
#include "schedule.h"

#include <algorithm>
#include <thread>

namespace vm {
namespace {

constexpr u32 kSlice = 1024;
// Turns in which nothing is written until only registers that change count as work, and then until it is a standstill.
// Slices may end anywhere in a loop that waits, so that what seems to be work may be none.
constexpr u32 kSuspicious = 256, kSuspiciouslyIdle = 8, kStandstill = 64;

u64 fingerprint_of(const Warp& w) {
  u64 sum = 0x9e3779b97f4a7c15ull + w.runnable;
  const auto add = [&](const u32* words, size_t count) {
    for (size_t n = 0; n < count; n++) sum = (sum ^ words[n]) * 0x100000001b3ull;
  };
  add(w.slots, static_cast<size_t>(w.cta->launch->slots) * kLanes);
  add(w.predicates, w.cta->launch->predicates);
  add(w.pc, kLanes);
  return sum;
}

}  // namespace

bool Cta::finished() const {
  u32 live = 0;
  for (const Warp& w : warps) live |= w.live;
  return live == 0;
}

bool Cta::run_slice(Warp& w, u32 budget) {
  try {
    return run_warp(w, budget);
  } catch (Fault& fault) {
    fault.text += print("\n  at %s, thread %d (warp %u, lane %u), CTA (%u, %u, %u)", place(*this, w.now).c_str(),
                        w.thread(static_cast<int>(fault_lane)), w.index, fault_lane, id[0], id[1], id[2]);
    throw;
  }
}

// By a random schedule: from a random warp on, with slices of all lengths, some warps left out of the round.
bool Cta::run_in_turn(bool strict) {
  bool worked = false;
  const u32 count = static_cast<u32>(warps.size());
  const bool shuffled = launch->schedule != kInTurn;
  const u32 first = shuffled ? random.below(count) : 0;
  const u32 longest = !shuffled ? kSlice : random.below(2) ? 16 : 8192;
  const bool leave_out = shuffled && random.below(2);
  for (u32 n = 0; n < count; n++) {
    Warp& w = warps[(first + n) % count];
    if (w.runnable == 0) continue;
    if (!(leave_out && random.below(3) == 0))
      worked |= run_slice(w, shuffled && !strict ? 1 + random.below(longest) : kSlice);
  }
  return worked;
}

// The warp of the highest priority runs until it waits; priorities are rarely drawn anew.
bool Cta::run_by_priority(bool strict) {
  const u32 count = static_cast<u32>(warps.size());
  if (priorities[0] == 0 || random.below(64) == 0)
    for (u32& priority : priorities) priority = 1 + random.below(1 << 20);
  const u32 longest = random.below(2) ? 16 : 8192;
  bool worked = false;
  std::vector<bool> waits(count);
  for (u32 n = 0; n < count; n++) {
    u32 best = count;
    for (u32 i = 0; i < count; i++)
      if (warps[i].runnable != 0 && !waits[i] && (best == count || priorities[i] > priorities[best])) best = i;
    if (best == count) break;
    const bool did = run_slice(warps[best], strict ? kSlice : 1 + random.below(longest));
    worked |= did;
    waits[best] = !did;
  }
  return worked;
}

bool Cta::turn(bool strict) {
  const u64 before = progress;
  bool worked = launch->schedule == kByPriority ? run_by_priority(strict) : run_in_turn(strict);
  if (executed > launch->instruction_limit)
    throw Fault{print("livelock: CTA (%u, %u, %u) ran %llu instructions", id[0], id[1], id[2],
                      static_cast<unsigned long long>(executed)) + describe_waiting()};
  if (launch->schedule != kInTurn && random.below(4) == 0) complete_some(*this, false);
  if (progress != before || (worked && !strict)) return true;
  if (complete_some(*this, launch->schedule == kInTurn)) return true;
  if (!strict) return false;
  worked = false;
  for (Warp& w : warps) {
    if (w.runnable == 0) continue;
    const u64 now = fingerprint_of(w);
    // A loop may stop at several places.
    if (std::find(w.fingerprints, std::end(w.fingerprints), now) != std::end(w.fingerprints)) continue;
    w.fingerprints[w.fingerprint++ % std::size(w.fingerprints)] = now;
    worked = true;
  }
  return worked;
}

std::string Cta::describe_waiting() const {
  std::string text;
  for (const Warp& w : warps) {
    for (const Stand& stand : w.stands) {
      if (stand.barrier == kClusterBarrier) {
        text += print("\n  warp %u, lanes %#x: at the cluster's barrier, ", w.index, stand.mask) +
                describe_cluster_barrier(*cluster) + ", " + place(*this, stand.pc);
        continue;
      }
      const NamedBarrier& barrier = barriers[stand.barrier];
      text += print("\n  warp %u, lanes %#x: at barrier %d, %u threads have arrived of ", w.index, stand.mask,
                    stand.barrier, barrier.arrived);
      text += barrier.expected != 0 ? print("%u", barrier.expected) : std::string("all");
      text += ", " + place(*this, stand.pc);
    }
    if (w.parked != 0)
      text += print("\n  warp %u, lanes %#x: wait for other %s, ", w.index, w.parked,
                    at_product(w) ? "warps of the warpgroup" : "lanes of the warp")
          + place(*this, w.pc[__builtin_ctz(w.parked)]);
    if (w.runnable == 0) continue;
    if (w.polling == 0)
      text += print("\n  warp %u, lanes %#x: run at ", w.index, w.runnable) + place(*this, w.now);
    else if (w.polls_memory)
      text += print("\n  warp %u, lanes %#x: look at %s again and again, ", w.index, w.runnable,
                    name_address(*this, w.poll_address).c_str()) +
              place(*this, w.poll_pc);
    else
      text += print("\n  warp %u, lanes %#x: wait for parity %u of the mbarrier at shared byte %lld (%s), ", w.index,
                    w.runnable,
                    w.poll_parity, static_cast<long long>(w.poll_address) - shared_base,
                    describe_mbarrier(*this, static_cast<u32>(w.poll_address)).c_str()) + place(*this, w.poll_pc);
  }
  return text;
}

Grid::Grid(Launch& given)
    : launch(given), regions(given.regions, given.regions + given.region_count), order(given, regions),
      cluster_size(given.cluster[0] * given.cluster[1] * given.cluster[2]),
      count(given.grid[0] * given.grid[1] * given.grid[2] / cluster_size) {}

Machine::Machine(Grid& grid) : grid_(grid) {
  random_.state = (grid.launch.seed + 1) * 0x9e3779b97f4a7c15ull;
  random_.next();
  fill();
}

// CTAs of a cluster stay until all of them have finished.
void Machine::retire(size_t first) {
  const auto begin = residents_.begin() + static_cast<std::ptrdiff_t>(first), end = begin + grid_.cluster_size;
  for (auto cta = begin; cta != end; ++cta) {
    (*cta)->counters[kInstructions] += (*cta)->executed;
    spare_.push_back(std::move(*cta));
  }
  residents_.erase(begin, end);
  clusters_.erase(clusters_.begin() + static_cast<std::ptrdiff_t>(first / grid_.cluster_size));
}

void Machine::start(u32 number) {
  const Launch& launch = grid_.launch;
  auto cluster = std::make_unique<Cluster>();
  u32 rest = number;
  for (int axis = 0; axis < 3; axis++) {
    const u32 extent = launch.grid[axis] / launch.cluster[axis];
    cluster->id[axis] = rest % extent;
    rest /= extent;
  }
  const size_t first = residents_.size();
  for (u32 rank = 0; rank < grid_.cluster_size; rank++) {
    if (spare_.empty()) spare_.push_back(std::make_unique<Cta>(launch, grid_.regions, grid_.order));
    cluster->members.push_back(spare_.back().get());
    residents_.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  for (u32 rank = 0; rank < grid_.cluster_size; rank++) residents_[first + rank]->start(*cluster, rank);
  cluster->home = cluster->members[0]->linear;
  clusters_.push_back(std::move(cluster));
}

void Machine::fill() {
  const u32 size = grid_.cluster_size;
  for (size_t first = 0; first < residents_.size();) {
    bool finished = true;
    for (u32 rank = 0; rank < size; rank++) finished &= residents_[first + rank]->finished();
    if (finished)
      retire(first);
    else
      first += size;
  }
  while (residents_.empty() || residents_.size() + size <= grid_.launch.resident) {
    const u32 number = grid_.next.fetch_add(1);
    if (number >= grid_.count) {
      grid_.next = grid_.count;
      break;
    }
    start(number);
  }
}

Cta* Machine::find(u32 linear) {
  for (const std::unique_ptr<Cta>& cta : residents_)
    if (cta->linear == linear) return cta.get();
  return nullptr;
}

void Machine::add_counters(u64* to) const {
  for (const auto* all : {&residents_, &spare_})
    for (const std::unique_ptr<Cta>& cta : *all)
      for (int n = 0; n < 4; n++) to[n] += cta->counters[n];
}

bool Machine::turn() {
  if (residents_.empty()) return false;
  const size_t count = residents_.size();
  const size_t first = count > 1 && grid_.launch.schedule != kInTurn ? random_.below(static_cast<u32>(count)) : 0;
  const bool strict = still_ >= kSuspicious || idle_ >= kSuspiciouslyIdle;
  bool worked = false, moved = false;
  for (size_t n = 0; n < count; n++) {
    Cta& cta = *residents_[(first + n) % count];
    const u64 before = cta.progress;
    worked |= cta.turn(strict);
    // Those that have finished stay while others of their cluster run, and do nothing.
    moved |= cta.progress != before;
  }
  still_ = moved ? 0 : still_ + 1;
  if (worked || moved) {
    grid_.activity++;
    // Registers that change may still be those of a loop that waits.
    idle_ = moved || !strict ? 0 : std::min(idle_, kSuspiciouslyIdle);
    fill();
    return !residents_.empty();
  }
  idle_++;
  if (grid_.launch.os_threads > 1 && activity_ != grid_.activity) {
    activity_ = grid_.activity;
    idle_ = 0;
    std::this_thread::yield();
  }
  if (idle_ >= kStandstill) report_standstill();
  return true;
}

void Machine::report_standstill() {
  bool polls = false;
  for (const auto& cta : residents_)
    for (const Warp& w : cta->warps) polls |= w.runnable != 0 && w.polls_memory;
  std::string text = polls ? "livelock: threads wait for what nobody will write" : "";
  const u32 next = std::min<u32>(grid_.next, grid_.count), size = grid_.cluster_size;
  if (polls && next < grid_.count)
    text += print("; of %u CTAs, those from number %u on have not started: %u are resident, and kernels that wait for "
                  "more need resident=%u", size * grid_.count, size * next, std::max(grid_.launch.resident, size),
                  size * grid_.count);
  for (const auto& cta : residents_) {
    if (text.size() > 3000) break;
    if (cta->finished()) continue;
    if (polls)
      text += print("\n in CTA (%u, %u, %u)", cta->id[0], cta->id[1], cta->id[2]);
    else
      text += print("%sdeadlock in CTA (%u, %u, %u): nothing can run and no copy is under way",
                    text.empty() ? "" : "\n ", cta->id[0],
                    cta->id[1], cta->id[2]);
    text += cta->describe_waiting();
  }
  text.resize(std::min<size_t>(text.size(), 3600));
  throw Fault{text};
}

}  // namespace vm
