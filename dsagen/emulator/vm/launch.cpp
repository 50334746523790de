// A CTA: its warps, their lanes, and what they hold; whose turn it is, is decided in schedule.cpp.
#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "counters.h"
#include "machine.h"

namespace vm {

namespace {

std::vector<std::pair<const char*, Handler>>& table() {
  static std::vector<std::pair<const char*, Handler>> all;
  return all;
}

std::string format(const char* text, va_list values) {
  char buffer[1024];
  vsnprintf(buffer, sizeof buffer, text, values);
  return buffer;
}

}  // namespace

Register::Register(const char* name, Handler handler) { table().emplace_back(name, handler); }
const std::vector<std::pair<const char*, Handler>>& handlers() { return table(); }

void fail(const char* text, ...) {
  va_list values;
  va_start(values, text);
  Fault fault{format(text, values)};
  va_end(values);
  throw fault;
}

std::string print(const char* text, ...) {
  va_list values;
  va_start(values, text);
  std::string out = format(text, values);
  va_end(values);
  return out;
}

std::string place(const Cta& cta, u32 pc) {
  const u32 cuda = cta.launch->cuda_lines[pc];
  std::string out = print("PTX line %u", cta.launch->ptx_lines[pc]);
  if (cuda != 0) out += print(", CUDA line %u", cuda);
  return out;
}

Cta::Cta(const Launch& given, const std::vector<Region>& all, GlobalOrder& order_of_all)
    : launch(&given), global(&order_of_all), regions(&all) {
  const u32 threads = given.block[0] * given.block[1] * given.block[2];
  const u32 count = (threads + kLanes - 1) / kLanes;
  const size_t row_words = static_cast<size_t>(given.slots) * kLanes;
  // Rows start at cache lines.
  storage.resize(count * (row_words + given.predicates) + 32);
  auto base = reinterpret_cast<u32*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) & ~uintptr_t(63));
  warps.resize(count);
  warpgroups.resize(count / kGroupWarps);
  priorities.resize(count);
  commit_groups.resize(static_cast<size_t>(count) * kLanes);
  bulk_groups.resize(commit_groups.size());
  for (u32 n = 0; n < count; n++) {
    Warp& w = warps[n];
    w.cta = this;
    w.index = n;
    w.slots = base + n * row_words;
    w.predicates = base + count * row_words + n * given.predicates;
    w.predicates[1] = kFullMask;
    const u32 lanes = std::min<u32>(kLanes, threads - n * kLanes);
    w.born = lanes == kLanes ? kFullMask : (1u << lanes) - 1;
    w.local.resize(static_cast<size_t>(given.local_bytes) * kLanes);
  }
  if (given.meter != nullptr) meter = std::make_shared<Meter>(given);
}

// Kinds: 0 the value itself, else a special register.
void Cta::load_specials(Warp& w) {
  if (meter != nullptr) meter->start(w);
  const Launch& g = *launch;
  for (u32 n = 0; n < g.preload_count; n++) {
    const Preload& p = g.preloads[n];
    u32* row = w.row(static_cast<u16>(p.slot));
    if (p.kind == 0) {  // most of them
      std::fill(row, row + kLanes, p.value);
      continue;
    }
    const u32 axis = p.kind >= 28 ? (p.kind - 28) % 3 : 0;
    for (u32 l = 0; l < kLanes; l++) {
      const u32 t = w.index * kLanes + l;
      switch (p.kind) {
        case 1: row[l] = t % g.block[0]; break;
        case 2: row[l] = t / g.block[0] % g.block[1]; break;
        case 3: row[l] = t / g.block[0] / g.block[1]; break;
        case 4: case 5: case 6: row[l] = g.block[p.kind - 4]; break;
        case 7: case 8: case 9: row[l] = id[p.kind - 7]; break;
        case 10: case 11: case 12: row[l] = g.grid[p.kind - 10]; break;
        case 13: row[l] = l; break;
        case 14: row[l] = w.index; break;
        case 15: row[l] = 1u << l; break;
        case 16: row[l] = (1u << l) - 1; break;
        case 17: row[l] = ((1u << l) - 1) | 1u << l; break;
        case 18: row[l] = ~((1u << l) - 1); break;
        case 19: row[l] = ~(((1u << l) - 1) | 1u << l); break;
        case 20: row[l] = g.dynamic_shared_bytes; break;
        case 21: row[l] = g.shared_bytes; break;
        case 22: row[l] = 0; break;
        case 23: row[l] = 1; break;
        case 24: row[l] = static_cast<u32>(warps.size()); break;
        case 25: row[l] = p.value + (rank << kRankShift); break;
        case 26: row[l] = rank; break;
        case 27: row[l] = static_cast<u32>(cluster->members.size()); break;
        case 28: case 29: case 30: row[l] = id[axis] % g.cluster[axis]; break;
        case 31: case 32: case 33: row[l] = g.cluster[axis]; break;
        case 34: case 35: case 36: row[l] = cluster->id[axis]; break;
        case 37: case 38: case 39: row[l] = g.grid[axis] / g.cluster[axis]; break;
      }
    }
  }
}

void Cta::start(Cluster& in, u32 number) {
  const u32* extents = launch->cluster;
  cluster = &in;
  rank = number;
  shared_base = kSharedReserve + (rank << kRankShift);
  const u32 within[] = {rank % extents[0], rank / extents[0] % extents[1], rank / extents[0] / extents[1]};
  for (int n = 0; n < 3; n++) id[n] = in.id[n] * extents[n] + within[n];
  linear = id[0] + launch->grid[0] * (id[1] + launch->grid[1] * id[2]);
  shared.assign(launch->shared_bytes, 0xff);
  shared_valid.assign(launch->shared_bytes, 0);
  for (Warpgroup& group : warpgroups) {
    group.arrived = 0;
    group.in_use.clear();
  }
  for (NamedBarrier& barrier : barriers) barrier = NamedBarrier();
  mbarriers.clear();
  order.reset(*this, linear);
  pending.clear();
  bulk.clear();
  std::fill(bulk_groups.begin(), bulk_groups.end(), 0);
  std::fill(commit_groups.begin(), commit_groups.end(), 0);
  copies_committed.assign(order.on ? commit_groups.size() : 0, {});
  executed = 0;
  // Registers that nobody has written hold the same in every CTA.
  std::fill(storage.begin(), storage.end(), kFullMask);
  for (u32& priority : priorities) priority = 0;
  random.state = (launch->seed + 1) * 0x9e3779b97f4a7c15ull + linear;
  random.next();
  for (Warp& w : warps) {
    std::fill(w.pc, w.pc + kLanes, 0);
    w.live = w.runnable = w.born;
    w.parked = w.yielded = w.polling = w.grid_waited = 0;
    w.cluster_arrived = w.cluster_passed = w.registers = 0;
    w.fingerprint = 0;
    w.groups = ProductGroups();
    w.stands.clear();
    std::fill(w.predicates, w.predicates + launch->predicates, 0);
    w.predicates[1] = kFullMask;
    load_specials(w);
  }
}

// Runs the lanes of w.group, which stand at one pc, until they part, stop, or meet the lanes at `limit`.
void Cta::run_group(Warp& w, u32 limit, u32& budget) {
  static const Handler* const functions = [] {
    auto* out = new Handler[handlers().size()];
    for (size_t n = 0; n < handlers().size(); n++) out[n] = handlers()[n].second;
    return out;
  }();
  const Ins* code = launch->code;
  u32 pc = w.now;
  w.stop = false;
  u32 left = budget;
  while (left != 0 && pc < limit) {
    left--;
    const Ins& i = code[pc];
    u32 mask = w.group;
    if (i.guard != 0) mask &= i.guard > 0 ? w.predicates[i.guard - 1] : ~w.predicates[-i.guard - 1];
    w.now = pc;
    w.next = pc + 1;
    if (meter != nullptr) meter->before(w, i, mask);
    if (mask != 0) {
      fault_lane = static_cast<u32>(__builtin_ctz(mask));
      functions[i.op](w, i, mask);
      if (meter != nullptr) meter->after(w);
      if (w.stop) break;
    } else if (meter != nullptr) {
      meter->after(w);
    }
    pc = w.next;
  }
  if (!w.stop) w.set_pc(w.group, pc);
  executed += budget - left;
  budget = left;
}

// True where the slice did more than to find mbarriers that are not there yet.
bool Cta::run_warp(Warp& w, u32 budget) {
  bool worked = false;
  w.yielded = w.polling = 0;
  while (budget != 0) {
    const u32 fresh = w.runnable & ~w.yielded;
    if (fresh == 0) return worked;
    u32 lowest = ~0u;
    for (u32 m = fresh; m != 0; m &= m - 1) lowest = std::min(lowest, w.pc[__builtin_ctz(m)]);
    u32 limit = ~0u;
    w.group = 0;
    for (u32 m = w.runnable; m != 0; m &= m - 1) {
      const int l = __builtin_ctz(m);
      if (w.pc[l] == lowest)
        w.group |= 1u << l;
      else if (w.pc[l] > lowest)
        limit = std::min(limit, w.pc[l]);
    }
    w.now = lowest;
    const u64 before = progress;
    run_group(w, limit, budget);
    // A group that has used up its slice may be spinning: its sisters go first the next time.
    worked |= w.yielded == 0 || progress != before || budget == 0;
  }
  return true;
}

}  // namespace vm

extern "C" uint32_t vm_instruction_count() { return static_cast<uint32_t>(vm::handlers().size()); }
extern "C" const char* vm_instruction_name(uint32_t n) { return vm::handlers()[n].first; }
// What Python states as well: operations.py has these in this order.
extern "C" uint64_t vm_address(uint32_t n) {
  constexpr vm::u64 kAddresses[] = {vm::kSharedReserve, vm::kLocalWindow, vm::kParamWindow};
  return kAddresses[n];
}
extern "C" uint32_t vm_launch_bytes() { return sizeof(vm::Launch); }
