// Loads, stores, atomics, and the checks of every address.
#include <algorithm>

#include "numerics.h"

namespace vm {
namespace {

const char* const kSpaceNames[] = {"generic", "global", "shared", "local", "param", "const", "shared::cluster"};

const Region* find_region(Cta& cta, u64 address) {
  const Region* last = cta.last_region;
  if (last != nullptr && address >= last->begin && address < last->end) return last;
  const auto& regions = *cta.regions;
  auto after = std::upper_bound(regions.begin(), regions.end(), address,
                                [](u64 a, const Region& region) { return a < region.begin; });
  if (after == regions.begin()) return nullptr;
  const Region& found = *--after;
  if (address >= found.end) return nullptr;
  cta.last_region = &found;
  return &found;
}

// Where an address lies that no buffer holds, for the message.
std::string nearest(Cta& cta, u64 address) {
  const Region* best = nullptr;
  u64 distance = ~0ull;
  for (const Region& region : *cta.regions) {
    const u64 away = address < region.begin ? region.begin - address : address - region.end;
    if (away < distance) distance = away, best = &region;
  }
  if (best == nullptr) return "no buffer is registered";
  if (address < best->begin)
    return print("%llu bytes before buffer %s", static_cast<unsigned long long>(distance), best->name);
  return print("%llu bytes past the end of buffer %s", static_cast<unsigned long long>(distance), best->name);
}

void set_valid(u8* valid, u32 bytes) {
  switch (bytes) {
    case 4: std::memset(valid, 1, 4); return;
    case 8: std::memset(valid, 1, 8); return;
    case 16: std::memset(valid, 1, 16); return;
    default: std::memset(valid, 1, bytes);
  }
}

}  // namespace

bool all_valid(const u8* valid, u32 bytes) {
  constexpr u64 kOnes = 0x0101010101010101ull;
  u64 words[2] = {};
  switch (bytes) {
    case 4: std::memcpy(words, valid, 4); return static_cast<u32>(words[0]) == static_cast<u32>(kOnes);
    case 8: std::memcpy(words, valid, 8); return words[0] == kOnes;
    case 16: std::memcpy(words, valid, 16); return words[0] == kOnes && words[1] == kOnes;
    default: return std::memchr(valid, 0, bytes) == nullptr;
  }
}

u8* global_bytes(Cta& cta, u64 address, u32 bytes, bool write, bool waited, const Region** in) {
  const auto shown = static_cast<unsigned long long>(address);
  const Region* region = find_region(cta, address);
  if (region == nullptr)
    fail("%s of %u bytes at global address %#llx: %s", write ? "write" : "read", bytes, shown,
         nearest(cta, address).c_str());
  if (address + bytes > region->end)
    fail("%s of %u bytes at global address %#llx runs past the end of buffer %s", write ? "write" : "read", bytes,
         shown,
         region->name);
  if (write && !region->writable)
    fail("write of %u bytes at %#llx into the read-only buffer %s", bytes, shown, region->name);
  if (region->after_wait && !waited)
    fail("%s of buffer %s, which the grid before writes, ahead of griddepcontrol.wait", write ? "write" : "read",
         region->name);
  if (in != nullptr) *in = region;
  u8* valid = region->valid;
  if (valid != nullptr) {
    valid += address - region->begin;
    if (write)
      set_valid(valid, bytes);
    else if (!all_valid(valid, bytes))
      fail("read of %u bytes of buffer %s at byte %llu, which nobody has written", bytes, region->name,
           static_cast<unsigned long long>(address - region->begin));
  }
  return region->host + (address - region->begin);
}

namespace {

struct LoadFormat {
  u32 bytes, count;
  bool is_signed;
  u32 total() const { return bytes * count; }
};
// flags: bits 0-2 space, 3-4 log2 of an element's bytes, 5-8 elements, 9 signed, 10 address is 64 bits wide,
// 11-12 log2 of the destination register's bytes, 13-15 what it orders (Semantics), 24-25 its scope (0 CTA, 1 wider).
LoadFormat format_of(u32 flags) { return {1u << (flags >> 3 & 3), flags >> 5 & 15, (flags >> 9 & 1) != 0}; }
Space space_of(u32 flags) { return static_cast<Space>(flags & 7); }
Semantics semantics_of(u32 flags) { return static_cast<Semantics>(flags >> 13 & 7); }
u32 scope_of(u32 flags) { return flags >> 24 & 3; }
// Loads and stores that are weak are not strong.
u32 strength_of(u32 flags) {
  if (semantics_of(flags) == Semantics::kWeak) return 0;
  return scope_of(flags) == 0 ? u32{kStrong} | kCtaScope : u32{kStrong};
}
Touch touch_of(bool write, u32 strong) { return strong != 0 ? Touch::kStrong : write ? Touch::kWrite : Touch::kRead; }

// Where a strong access synchronises: null for global memory, else in whose shared memory, at an address of that space.
Order* owner_of_place(Warp& w, u32 flags, u64& address) {
  const Space space = space_of(flags);
  if (space == kShared || space == kLocal) return &w.cta->order;
  const bool generic = space == kGeneric && (address & ~(kWindowBytes - 1)) == kSharedWindow;
  if (!generic && space != kCluster) return nullptr;
  if (generic) address -= kSharedWindow;
  return &owner_of(*w.cta, static_cast<u32>(address), "strong access").order;
}

void find(Warp& w, const Ins& i, int lane, u64 address) {
  Order& order = w.cta->order;
  if (!order.on || !order.synchronises()) return;
  Order* const owner = owner_of_place(w, i.flags, address);
  order.find(w, static_cast<u32>(lane), owner, address, semantics_of(i.flags), scope_of(i.flags));
}

void leave(Warp& w, const Ins& i, int lane, u64 address, bool replaces) {
  Order& order = w.cta->order;
  if (!order.on || !order.synchronises()) return;
  Order* const owner = owner_of_place(w, i.flags, address);
  order.leave(w, static_cast<u32>(lane), owner, address, semantics_of(i.flags), scope_of(i.flags), replaces);
}

u64 load_bits(const u8* from, const LoadFormat& format) {
  u64 bits = 0;
  std::memcpy(&bits, from, format.bytes);
  if (format.is_signed && format.bytes < 8) {
    const u32 shift = 64 - 8 * format.bytes;
    bits = static_cast<u64>(static_cast<i64>(bits << shift) >> shift);
  }
  return bits;
}

void store_register(u32* row, int lane, u64 bits, u32 log_bytes) {
  row[lane] = log_bytes == 1 ? static_cast<u32>(bits & 0xffff) : static_cast<u32>(bits);
  if (log_bytes == 3) row[lane + kLanes] = static_cast<u32>(bits >> 32);
}

// Destinations, then the address.
void ld(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const LoadFormat format = format_of(i.flags);
  const Space space = space_of(i.flags);
  const u32 strong = strength_of(i.flags);
  // Words into 32-bit registers, by far the most frequent.
  if (strong == 0 && (i.flags >> 3 & 3) == 2 && (i.flags >> 11 & 3) == 2) {
    for (u32 m = mask; m != 0; m &= m - 1) {
      const int l = __builtin_ctz(m);
      const u8* from = access(w, space, address_of(w, i, x[format.count], l), format.total(), false, l, strong);
      for (u32 n = 0; n < format.count; n++) std::memcpy(w.row(x[n]) + l, from + 4 * n, 4);
    }
    return;
  }
  // A destination may be the register of the address.
  const u64 address = address_of(w, i, x[format.count], __builtin_ctz(mask));
  for (u32 m = mask; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u64 from_address = address_of(w, i, x[format.count], l);
    const u8* from = access(w, space, from_address, format.total(), false, l, strong);
    for (u32 n = 0; n < format.count; n++)
      store_register(w.row(x[n]), l, load_bits(from + n * format.bytes, format), i.flags >> 11 & 3);
    // After the value, which another thread of the host may write meanwhile: what led to it is then found.
    if (strong != 0) find(w, i, l, from_address);
  }
  if (strong != 0) poll(w, mask, address);
}

// Lanes of a weak store whose order is checked with that of others, at less cost; see Order::store_together.
u32 ordered_together(Warp& w, const Ins& i, u32 mask, u16 operand, Space space, u32 bytes) {
  Cta& cta = *w.cta;
  if (!cta.order.on || (bytes != 4 && bytes != 8) || (mask & (mask - 1)) == 0) return 0;
  const u64 first = address_of(w, i, operand, __builtin_ctz(mask));
  u64 base = cta.shared_base, size = cta.shared.size();
  u32 region = kNoRegion;
  if (space == kGeneric && (first & ~(kWindowBytes - 1)) == kSharedWindow) {
    base += kSharedWindow;
  } else if (space == kGlobal || space == kGeneric) {
    const Region* found = find_region(cta, first);
    if (found == nullptr || !found->writable) return 0;
    base = found->begin, size = found->end - found->begin;
    region = static_cast<u32>(found - cta.regions->data());
  } else if (space != kShared) {
    return 0;
  }
  u64 offsets[kLanes];
  each_lane(mask, [&](int l) { offsets[l] = address_of(w, i, operand, l) - base; });
  return cta.order.store_together(w, mask, offsets, bytes, region, size);
}

// The address, then the sources.
void st(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const LoadFormat format = format_of(i.flags);
  const Space space = space_of(i.flags);
  const u32 strong = strength_of(i.flags);
  Order& order = w.cta->order;
  w.cta->progress++;
  w.store++;
  const u32 ordered = strong != 0 ? 0 : ordered_together(w, i, mask, x[0], space, format.total());
  for (u32 m = mask; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    order.met = false;
    u8* to = access(w, space, address_of(w, i, x[0], l), format.total(), true, l, strong, ordered >> l & 1);
    if (strong != 0) leave(w, i, l, address_of(w, i, x[0], l), true);
    if (format.bytes == 4 && !order.met) {
      for (u32 n = 0; n < format.count; n++) std::memcpy(to + 4 * n, w.row(x[1 + n]) + l, 4);
      continue;
    }
    for (u32 n = 0; n < format.count; n++) {
      const u32* row = w.row(x[1 + n]);
      const u64 bits = format.bytes == 8 ? get<u64>(row, l) : row[l];
      if (order.met && std::memcmp(to + n * format.bytes, &bits, format.bytes) != 0)
        fail("race: lanes of one store write different values to one address");
      std::memcpy(to + n * format.bytes, &bits, format.bytes);
    }
  }
}

void require_writable(Warp& w, Space space, u64 address) {
  if (space == kShared || space == kCluster || space == kLocal) return;
  const Region* region = find_region(*w.cta, address);
  if (region != nullptr && !region->writable) fail("atomic access of the read-only buffer %s", region->name);
}

// Between the generic space and the shared window; the other windows need no change. imm 1: to shared.
void cvta_shared(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  for (u32 m = mask; m != 0; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u64 a = get<u64>(w.row(x[1]), l);
    put<u64>(w.row(x[0]), l, i.imm == 1 ? a - kSharedWindow : a + kSharedWindow);
  }
}

// Which space a generic address lies in: predicate, address; imm is the space.
void isspacep(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  u32 bits = 0;
  for (int l = 0; l < kLanes; l++) {
    const u64 a = get<u64>(w.row(x[1]), l);
    const u64 window = a & ~(kWindowBytes - 1);
    const Space space = window == kSharedWindow ? kShared : window == kLocalWindow ? kLocal
                        : window == kParamWindow ? kParam : kGlobal;
    const bool own = space == kShared && static_cast<u32>(a) >> kRankShift == w.cta->rank;
    const bool is = i.imm == kCluster ? space == kShared : i.imm == kShared ? own : space == static_cast<Space>(i.imm);
    bits |= static_cast<u32>(is) << l;
  }
  w.set_predicate(x[0], mask, bits);
}

const Register registers[] = {{"ld", ld},
                              {"st", st},
                              {"cvta_shared", cvta_shared},
                              {"isspacep", isspacep}};

}  // namespace

u8* atomic_access(Warp& w, const Ins& i, u64 address, u32 bytes, int lane) {
  u8* at = access(w, space_of(i.flags), address, bytes, false, lane, strength_of(i.flags));
  require_writable(w, space_of(i.flags), address);
  return at;
}

void order_atomic(Warp& w, const Ins& i, u64 address, int lane) {
  find(w, i, lane, address);
  leave(w, i, lane, address, false);
}

void end_atomic(Warp& w, u32 mask, u64 address, bool changes) {
  if (changes) w.cta->progress++;
  if (!changes || w.cta->launch->resident > 1) poll(w, mask, address);
}

std::string name_address(const Cta& cta, u64 address) {
  for (const Region& region : *cta.regions)
    if (address >= region.begin && address < region.end)
      return print("byte %llu of buffer %s", static_cast<unsigned long long>(address - region.begin), region.name);
  const u64 shared = address >= kSharedWindow ? address - kSharedWindow : address;
  const u64 rank = shared >> kRankShift;
  const auto byte = static_cast<long long>(shared & ((1u << kRankShift) - 1)) - kSharedReserve;
  if (rank == cta.rank) return print("shared byte %lld", byte);
  return print("shared byte %lld of the CTA of rank %llu", byte, static_cast<unsigned long long>(rank));
}

u64 address_of(Warp& w, const Ins& i, u16 operand, int lane) {
  const u32* row = w.row(operand);
  const u64 base = i.flags >> 10 & 1 ? get<u64>(row, lane) : row[lane];
  return base + static_cast<i64>(i.imm);
}

u8* shared_bytes(Cta& cta, u32 address, u32 bytes, const char* what) {
  const u32 size = static_cast<u32>(cta.shared.size()), offset = address - cta.shared_base;
  if (offset > size || size - offset < bytes) {
    require_own(cta, address, what);
    fail("%s of %u bytes at shared byte %lld: the CTA has %u", what, bytes,
         static_cast<long long>(address) - cta.shared_base, size);
  }
  return cta.shared.data() + offset;
}

const u8* global_source(Cta& cta, u64 address, u32 bytes, bool waited) {
  return global_bytes(cta, address, bytes, false, waited);
}

u8* access(Warp& w, Space space, u64 address, u32 bytes, bool write, int lane, u32 strong, bool ordered) {
  Cta& cta = *w.cta;
  cta.fault_lane = static_cast<u32>(lane);
  if (space == kGeneric) {
    const u64 window = address & ~(kWindowBytes - 1);
    space = window == kSharedWindow ? kShared : window == kLocalWindow ? kLocal
            : window == kParamWindow ? kParam : kGlobal;
    if (space == kShared) address -= kSharedWindow, space = kCluster;
  }
  // Parameters of functions are memory of the thread.
  if (space == kParam && (address & ~(kWindowBytes - 1)) == kLocalWindow) space = kLocal;
  if ((address & (bytes - 1)) != 0)
    fail("%s of %u bytes at %s address %#llx: misaligned", write ? "write" : "read", bytes, kSpaceNames[space],
         static_cast<unsigned long long>(address));
  if (space == kCluster) {
    if (address >> kRankShift != cta.rank)
      return remote_access(w, static_cast<u32>(address), bytes, write, lane, strong);
    space = kShared;
  }
  if (space == kShared) {
    if (address > kFullMask)
      fail("shared address %#llx has more than 32 bits", static_cast<unsigned long long>(address));
    u8* at = shared_bytes(cta, static_cast<u32>(address), bytes, write ? "write" : "read");
    u8* valid = cta.shared_valid.data() + (at - cta.shared.data());
    if (write) {
      set_valid(valid, bytes);
    } else if (!all_valid(valid, bytes)) {
      fail("read of %u bytes at shared byte %lld, not written before (or an asynchronous copy has not been waited for)",
           bytes,
           static_cast<long long>(at - cta.shared.data()));
    }
    if (cta.order.on && !ordered)
      cta.order.shared(w, static_cast<u32>(lane), static_cast<u32>(at - cta.shared.data()), bytes,
                       touch_of(write, strong), strong);
    return at;
  }
  if (space == kLocal) {
    const u64 offset = address - kLocalWindow, size = cta.launch->local_bytes;
    if (offset > size || size - offset < bytes)
      fail("local byte %lld: a thread has %llu", static_cast<long long>(offset), static_cast<unsigned long long>(size));
    return w.local.data() + static_cast<u64>(lane) * size + offset;
  }
  if (space == kParam) {
    const u64 offset = address - kParamWindow, size = cta.launch->param_bytes;
    if (write) fail("write to a kernel parameter");
    if (offset > size || size - offset < bytes)
      fail("parameter byte %lld: there are %llu", static_cast<long long>(offset),
           static_cast<unsigned long long>(size));
    return const_cast<u8*>(cta.launch->params) + offset;
  }
  const Region* region = nullptr;
  u8* at = global_bytes(cta, address, bytes, write, w.grid_waited >> lane & 1, &region);
  // Nobody writes to read-only buffers.
  if (cta.order.on && region->writable && !ordered)
    cta.order.global(w, static_cast<u32>(lane), static_cast<u32>(region - cta.regions->data()),
                     address - region->begin, bytes,
                     touch_of(write, strong), strong);
  return at;
}

}  // namespace vm
