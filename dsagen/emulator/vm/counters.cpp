// Counters of a launch. They depend on the program, its data and its paths, not on the order in which warps run:
// an instruction counts once for each group of lanes that runs it, a warp-wide one once for the warp, and what a failed
// mbarrier wait leads to does not count until the lanes come to their next wait.
//
// Global memory: a request of a warp moves the 32-byte sectors that its lanes touch, each once, whatever the width.
// Shared memory: 32 banks of 4 bytes. A request of 8 bytes a lane is served half a warp at a time, one of 16 bytes a
// quarter, ldmatrix and stmatrix a matrix. Each part takes as many wavefronts as the busiest bank has different words;
// all of them but one are conflicts. Atomics on one word take turns, so there each lane is a wavefront of its own.
// Bulk copies move sectors, but they are no request of a warp: they take no wavefronts here.
#include "counters.h"

#include <algorithm>

namespace vm {
namespace {

constexpr u32 kSectorBytes = 32, kBanks = 32, kWordBytes = 4;

enum Kind : u8 { kOther, kLoad, kStore, kAtom, kMatrixLoad, kMatrixStore, kCopy, kWait };

// The kind of each instruction of the machine, by its number.
const std::vector<u8>& kinds() {
  static const std::vector<u8> all = [] {
    const std::pair<const char*, Kind> named[] = {
        {"ld", kLoad}, {"st", kStore}, {"atom", kAtom}, {"ldmatrix", kMatrixLoad}, {"stmatrix", kMatrixStore},
        {"copy_async", kCopy}, {"mbarrier_wait", kWait}};
    std::vector<u8> out(handlers().size(), kOther);
    for (size_t n = 0; n < out.size(); n++)
      for (const auto& [name, kind] : named)
        if (std::strcmp(handlers()[n].first, name) == 0) out[n] = kind;
    return out;
  }();
  return all;
}

// Where a generic address leads; a shared one becomes an offset of the 32-bit space.
Space resolve(const Cta& cta, Space space, u64& address) {
  const auto of_cluster = [&] { return address >> kRankShift == cta.rank ? kShared : kCluster; };
  if (space == kCluster) return of_cluster();
  if (space != kGeneric) return space;
  const u64 window = address & ~(kWindowBytes - 1);
  if (window == kSharedWindow) address -= kSharedWindow;
  if (window == kSharedWindow) return of_cluster();
  return window == kLocalWindow ? kLocal : window == kParamWindow ? kParam : kGlobal;
}

}  // namespace

Meter::Meter(const Launch& launch)
    : totals_(*launch.meter),
      executions_(launch.instructions),
      spinning_((launch.block[0] * launch.block[1] * launch.block[2] + kLanes - 1) / kLanes) {}

// Meters of other threads may end at the same time.
Meter::~Meter() {
  for (size_t n = 0; n < executions_.size(); n++)
    __atomic_fetch_add(totals_.executions + n, executions_[n], __ATOMIC_RELAXED);
  for (u32 n = 0; n < kMetrics; n++) __atomic_fetch_add(totals_.metrics + n, metrics_[n], __ATOMIC_RELAXED);
}

void Meter::start(const Warp& w) { spinning_[w.index] = 0; }

void Meter::before(Warp& w, const Ins& i, u32 mask) {
  std::fill(found_, found_ + kMetrics, 0);
  pc_ = w.now;
  mask_ = mask;
  const u8 kind = kinds()[i.op];
  waits_ = kind == kWait && mask != 0;
  u32& spinning = spinning_[w.index];
  if (waits_) spinning &= ~mask;
  measured_ = (w.group & ~spinning) != 0;
  if (measured_ && mask != 0 && kind != kOther && kind != kWait) measure(w, i, mask);
}

void Meter::after(const Warp& w) {
  // Lanes that were parked come back to the same instruction.
  if (!measured_ || (mask_ & w.parked) != 0) return;
  if (waits_ && w.polling != 0) {
    spinning_[w.index] |= w.polling;
    if ((mask_ & ~w.polling) == 0) return;
  }
  executions_[pc_]++;
  for (u32 n = 0; n < kMetrics; n++) metrics_[n] += found_[n];
}

void Meter::measure(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u64 addresses[kLanes] = {}, others[kLanes] = {};
  const u8 kind = kinds()[i.op];
  if (kind == kLoad || kind == kStore || kind == kAtom) {
    const u32 count = i.flags >> 5 & 15, bytes = (1u << (i.flags >> 3 & 3)) * count;
    const u16 operand = x[kind == kLoad ? count : kind == kStore ? 0 : 1];
    u32 in[kSpaces] = {};
    for (u32 m = mask; m != 0; m &= m - 1) {
      const int l = __builtin_ctz(m);
      addresses[l] = address_of(w, i, operand, l);
      in[resolve(*w.cta, static_cast<Space>(i.flags & 7), addresses[l])] |= 1u << l;
    }
    if (kind != kStore) global(addresses, in[kGlobal], bytes, false);
    if (kind != kLoad) global(addresses, in[kGlobal], bytes, true);
    shared(addresses, in[kShared], bytes, kind != kLoad, kind == kAtom);
  } else if (kind == kMatrixLoad || kind == kMatrixStore) {
    const u32 count = i.flags >> 3 & 7;
    const u16* at = x + (kind == kMatrixLoad ? count : 0);
    u32 in[kSpaces] = {};
    const auto space = static_cast<Space>(i.flags & 7);
    for (int l = 0; l < static_cast<int>(8 * count); l++) {
      addresses[l] = space == kShared ? narrow_address(w, at, l) : wide_address(w, at, l);
      in[resolve(*w.cta, space, addresses[l])] |= 1u << l;
    }
    shared(addresses, in[kShared], 16, kind == kMatrixStore, false);
  } else {
    // Lanes that copy nothing write zeros.
    u32 reading = 0;
    for (u32 m = mask; m != 0; m &= m - 1) {
      const int l = __builtin_ctz(m);
      addresses[l] = narrow_address(w, x, l);
      others[l] = wide_address(w, x + 3, l);
      if (w.row(x[6])[l] != 0) reading |= 1u << l;
    }
    global(others, reading, static_cast<u32>(i.imm), false);
    shared(addresses, mask, static_cast<u32>(i.imm), true, false);
  }
}

void Meter::global(const u64* addresses, u32 mask, u32 bytes, bool write) {
  if (mask == 0 || bytes == 0) return;
  u64 sectors = 0;
  if ((mask & (mask - 1)) == 0) {
    const u64 first = addresses[__builtin_ctz(mask)];
    sectors = (first + bytes - 1) / kSectorBytes - first / kSectorBytes + 1;
  } else {
    // An access of a lane is aligned to its width, 32 bytes at most, so it lies in one sector.
    u64 touched[kLanes];
    u32 count = 0;
    each_lane(mask, [&](int l) { touched[count++] = addresses[l] / kSectorBytes; });
    std::sort(touched, touched + count);
    sectors = static_cast<u64>(std::unique(touched, touched + count) - touched);
  }
  const u64 lanes = static_cast<u64>(__builtin_popcount(mask));
  add(write ? kGlobalWrittenBytes : kGlobalReadBytes, bytes * lanes);
  add(write ? kGlobalWrittenSectors : kGlobalReadSectors, sectors);
}

void Meter::shared(const u64* addresses, u32 mask, u32 bytes, bool write, bool serial) {
  const u32 part_lanes = bytes <= kWordBytes ? kLanes : kLanes * kWordBytes / bytes;
  const u32 words = std::max(1u, bytes / kWordBytes);
  for (u32 first = 0; first < kLanes; first += part_lanes) {
    const u32 part = mask & (part_lanes == kLanes ? kFullMask : ((1u << part_lanes) - 1) << first);
    if (part == 0) continue;
    u32 busy[kBanks] = {};
    u64 seen[kBanks][kLanes];
    u32 most = 0;
    each_lane(part, [&](int l) {
      for (u32 n = 0; n < words; n++) {
        const u64 word = addresses[l] / kWordBytes + n;
        const u32 bank = static_cast<u32>(word % kBanks);
        u64* const begin = seen[bank];
        if (!serial && std::find(begin, begin + busy[bank], word) != begin + busy[bank]) continue;
        begin[busy[bank]++] = word;
        most = std::max(most, busy[bank]);
      }
    });
    add(write ? kSharedWrittenWavefronts : kSharedReadWavefronts, most);
    add(write ? kSharedWrittenConflicts : kSharedReadConflicts, most - 1);
  }
}

}  // namespace vm
