// wgmma: four warps that come to a product, its groups, and the waits for them.
#include "wgmma.h"

#include <algorithm>
#include <iterator>

#include "wgmma_products.h"

namespace vm {
namespace {

Warp* first_warp(Warp& w) { return w.cta->warps.data() + w.index / kGroupWarps * kGroupWarps; }

bool gather_warp(Warp& w, u32& mask, const char* what) {
  if (!gather(w, mask, w.born)) return false;
  if (mask != kFullMask) fail("%s in a warp of fewer than 32 threads", what);
  return true;
}

// True once the last of the four warps is here; the others are parked meanwhile.
bool gather_warpgroup(Warp& w, u32& mask) {
  if (!gather_warp(w, mask, "wgmma.mma_async")) return false;
  Cta& cta = *w.cta;
  const u32 number = w.index / kGroupWarps, first = number * kGroupWarps;
  if (first + kGroupWarps > cta.warps.size())
    fail("wgmma.mma_async in warp %u: it and those after it are no warpgroup of 128 threads", w.index);
  Warpgroup& group = cta.warpgroups[number];
  if (group.arrived != 0 && group.pc != w.now)
    fail("wgmma.mma_async: warp %u is here, others of its warpgroup (warps %u to %u) are at %s", w.index, first, first + 3,
         place(cta, group.pc).c_str());
  for (u32 n = first; n < first + kGroupWarps; n++)
    if (cta.warps[n].live != kFullMask) fail("wgmma.mma_async: lanes of warp %u have exited", n);
  group.pc = w.now;
  group.arrived |= 1u << w.index % kGroupWarps;
  cta.progress++;
  if (group.arrived != (1u << kGroupWarps) - 1) {
    w.set_pc(mask, w.now);
    w.parked |= mask;
    w.runnable &= ~mask;
    w.stop = true;
    return false;
  }
  group.arrived = 0;
  return true;
}

void release_others(Warp& w) {
  Warp* warps = first_warp(w);
  for (u32 n = 0; n < kGroupWarps; n++) {
    if (warps + n == &w) continue;
    warps[n].parked = 0;
    warps[n].runnable = kFullMask;
    warps[n].set_pc(kFullMask, w.now + 1);
  }
}

// What all threads of the warpgroup have to hold alike.
u64 uniform(Warp* warps, u16 slot, const char* what) {
  const u64 value = get<u64>(warps[0].row(slot), 0);
  for (u32 n = 0; n < kGroupWarps; n++)
    for (int l = 0; l < kLanes; l++)
      if (get<u64>(warps[n].row(slot), l) != value)
        fail("wgmma.mma_async: the descriptor of %s is %#llx in warp %u, lane 0, and %#llx in warp %u, lane %d", what,
             static_cast<unsigned long long>(value), warps[0].index,
             static_cast<unsigned long long>(get<u64>(warps[n].row(slot), l)), warps[n].index, l);
  return value;
}

bool uniform_predicate(Warp* warps, u16 predicate) {
  const u32 bits = warps[0].predicate(predicate);
  for (u32 n = 0; n < kGroupWarps; n++) {
    const u32 other = warps[n].predicate(predicate);
    if (other != bits || (other != 0 && other != kFullMask))
      fail("wgmma.mma_async: threads of warp %u disagree on whether to add to what the accumulators hold", warps[n].index);
  }
  return bits != 0;
}

// The operands' bytes one after the other.
void fetch(Cta& cta, const std::vector<u32>& addresses, std::vector<u8>& bytes) {
  bytes.resize(addresses.size() * kChunkBytes);
  const u8 *shared = cta.shared.data(), *valid = cta.shared_valid.data();
  const u64 size = cta.shared.size();
  u8* to = bytes.data();
  for (const u32 address : addresses) {
    // Ahead of the reserve it wraps around.
    const u64 at = address - kSharedReserve;
    // A descriptor has no room for a rank: it is always one of the own CTA.
    if (at + kChunkBytes > size)
      shared_bytes(cta, address | cta.rank << kRankShift, kChunkBytes, "wgmma.mma_async: read");
    constexpr u64 kOnes = 0x0101010101010101ull;
    u64 written[2];
    std::memcpy(written, valid + at, sizeof written);
    if ((written[0] & written[1]) != kOnes)
      fail("wgmma.mma_async: read of %u bytes at shared byte %u, not written before (or an asynchronous copy has not been "
           "waited for)", kChunkBytes, static_cast<u32>(at));
    std::memcpy(to, shared + at, kChunkBytes);
    to += kChunkBytes;
  }
}

OperandsInUse take_spare(Warpgroup& group) {
  if (group.spare.empty()) return {};
  OperandsInUse out = std::move(group.spare.back());
  group.spare.pop_back();
  out.addresses.clear();
  return out;
}

// Operands: D, A (a descriptor, or 4 registers), descriptor of B, whether D is added to.
using Multiply = void (*)(Warp*, const WgmmaForm&, const WgmmaOperands&);
template <Multiply MULTIPLY>
void mma_async(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  if (!gather_warpgroup(w, mask)) return;
  Cta& cta = *w.cta;
  Warp* warps = first_warp(w);
  const WgmmaForm form(i);
  const u32 open = w.groups.committed + 1;
  for (u32 n = 0; n < kGroupWarps; n++)
    if (warps[n].groups.committed + 1 != open)
      fail("wgmma.mma_async: warp %u has committed %u groups, warp %u %u", w.index, open - 1, warps[n].index,
           warps[n].groups.committed);
  const u16 *a = x + form.results(), *b = a + (form.a_in_registers ? 4 : 1);
  Warpgroup& group = cta.warpgroups[w.index / kGroupWarps];
  OperandsInUse use = take_spare(group);
  use.group = open, use.pc = w.now;
  if (!form.a_in_registers) add_chunks(uniform(warps, a[0], "A"), kRowsOfA, form.a_transposed, "A", use.addresses);
  const size_t of_a = use.addresses.size();
  add_chunks(uniform(warps, b[0], "B"), form.columns, form.b_transposed, "B", use.addresses);
  fetch(cta, use.addresses, use.bytes);
  if (cta.order.on) cta.order.read_by_warpgroup(w, open, use.addresses);
  const bool adds = uniform_predicate(warps, b[1]);
  MULTIPLY(warps, form, {use.bytes.data(), use.bytes.data() + of_a * kChunkBytes, x, a, adds});
  for (u32 n = 0; n < kGroupWarps; n++) warps[n].groups.last = open;
  (cta.order.on ? group.spare : group.in_use).push_back(std::move(use));
  cta.counters[kMatrixProducts]++;
  release_others(w);
}

void fence(Warp& w, const Ins&, u32 mask) { gather_warp(w, mask, "wgmma.fence"); }

void commit(Warp& w, const Ins&, u32 mask) {
  if (gather_warp(w, mask, "wgmma.commit_group")) w.groups.committed++;
}

// Without checks for races: the operands of groups up to `last` have to be what they were.
void require_unchanged(Warp& w, u32 last) {
  Cta& cta = *w.cta;
  std::vector<OperandsInUse>& in_use = cta.warpgroups[w.index / kGroupWarps].in_use;
  for (const OperandsInUse& use : in_use) {
    if (use.group > last) continue;
    const u8* was = use.bytes.data();
    for (size_t n = 0; n < use.addresses.size(); n++, was += kChunkBytes) {
      u64 now[2], then[2];
      std::memcpy(now, cta.shared.data() + (use.addresses[n] - kSharedReserve), sizeof now);
      std::memcpy(then, was, sizeof then);
      if (now[0] != then[0] || now[1] != then[1])
        fail("wgmma.wait_group: shared byte %u was overwritten since the product at %s, which may have read it until now",
             use.addresses[n] - kSharedReserve, place(cta, use.pc).c_str());
    }
  }
  const auto done = std::partition(in_use.begin(), in_use.end(),
                                   [last](const OperandsInUse& use) { return use.group > last; });
  std::vector<OperandsInUse>& spare = cta.warpgroups[w.index / kGroupWarps].spare;
  spare.insert(spare.end(), std::make_move_iterator(done), std::make_move_iterator(in_use.end()));
  in_use.erase(done, in_use.end());
}

// imm is how many groups may remain.
void wait(Warp& w, const Ins& i, u32 mask) {
  if (!gather_warp(w, mask, "wgmma.wait_group")) return;
  ProductGroups& groups = w.groups;
  const u32 left = static_cast<u32>(i.imm);
  if (groups.committed <= left) return;
  groups.waited = std::max(groups.waited, groups.committed - left);
  if (w.index / kGroupWarps >= w.cta->warpgroups.size()) return;
  if (w.cta->order.on)
    w.cta->order.wait_for_warpgroup(w, groups.waited);
  else
    require_unchanged(w, groups.waited);
}

// A fault that was found ahead of the launch, and is one where it is reached.
void misuse(Warp& w, const Ins& i, u32) { fail("%s", w.cta->launch->unknown[i.imm]); }

const Register registers[] = {{"wgmma_k8", mma_async<multiply<8>>},
                              {"wgmma_k16", mma_async<multiply<16>>},
                              {"wgmma_k32", mma_async<multiply<32>>},
                              {"wgmma_bytes_k32", mma_async<multiply_bytes>},
                              {"warpgroup_fence", fence},
                              {"warpgroup_commit", commit},
                              {"warpgroup_wait", wait},
                              {"misuse", misuse}};

}  // namespace

bool at_product(const Warp& w) {
  const u32 number = w.index / kGroupWarps;
  return number < w.cta->warpgroups.size() && (w.cta->warpgroups[number].arrived >> w.index % kGroupWarps & 1) != 0;
}

void require_no_products(const Warp& w) {
  if (w.groups.last <= w.groups.waited) return;
  fail("exit with products of wgmma that were not waited for: the last is of group %u, %u were committed and %u waited for",
       w.groups.last, w.groups.committed, w.groups.waited);
}

}  // namespace vm
