// The sixteen barriers of a CTA.
#include "machine.h"

namespace vm {
namespace {

enum Mode : u32 { kSync, kArrive, kRedAnd, kRedOr, kRedPopc };

u32 live_threads(const Cta& cta) {
  u32 sum = 0;
  for (const Warp& warp : cta.warps) sum += static_cast<u32>(__builtin_popcount(warp.live));
  return sum;
}

void release(Cta& cta, int id) {
  const NamedBarrier done = std::move(cta.barriers[id]);
  const auto mode = static_cast<Mode>(done.mode);
  cta.barriers[id] = NamedBarrier();
  cta.progress++;
  cta.counters[kBarriers]++;
  for (Warp& warp : cta.warps) {
    size_t kept = 0;
    for (const Stand& stand : warp.stands) {
      if (stand.barrier != id) {
        warp.stands[kept++] = stand;
        continue;
      }
      warp.runnable |= stand.mask;
      if (cta.order.on && stand.mask == warp.live) cta.order.acquire_all(warp, done.clock);
      if (cta.order.on && stand.mask != warp.live) cta.order.acquire(warp, stand.mask, done.clock);
      if (mode == kRedPopc)
        each_lane(stand.mask, [&](int l) { warp.row(stand.result)[l] = done.count; });
      else if (mode != kSync)
        warp.set_predicate(stand.result, stand.mask, (mode == kRedAnd ? done.all : done.any) ? kFullMask : 0);
    }
    warp.stands.resize(kept);
  }
}

// Operands: result, barrier, count, predicate. flags: bits 0-3 mode, 4 a count is given, 5 aligned.
void bar(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const auto mode = static_cast<Mode>(i.flags & 15);
  const bool counted = (i.flags >> 4 & 1) != 0;
  if ((i.flags >> 5 & 1) != 0 && !gather(w, mask, w.live)) return;
  const int first = __builtin_ctz(mask);
  const u32 id = w.row(x[1])[first], count = counted ? w.row(x[2])[first] : 0;
  each_lane(mask, [&](int l) {
    if (w.row(x[1])[l] != id || (counted && w.row(x[2])[l] != count))
      fail("lanes of a warp name different barriers or counts");
  });
  if (id >= 16) fail("barrier %u: there are barriers 0 to 15", id);
  if (counted && (count == 0 || count % kLanes != 0))
    fail("barrier %u: %u threads are no positive multiple of 32", id, count);
  Cta& cta = *w.cta;
  NamedBarrier& barrier = cta.barriers[id];
  if (barrier.arrived != 0 && barrier.expected != count)
    fail("barrier %u: %u threads are expected here, %u by those who have arrived (0: all of the CTA)", id, count,
         barrier.expected);
  const u32 waits = mode == kArrive ? kSync : mode;
  if (barrier.arrived != 0 && barrier.mode != waits) fail("barrier %u: a reduction and something else meet", id);
  barrier.mode = waits;
  barrier.expected = count;
  barrier.arrived += static_cast<u32>(__builtin_popcount(mask));
  if (mode >= kRedAnd) {
    const u32 votes = w.predicate(x[3]) & mask;
    barrier.any |= votes != 0;
    barrier.all &= votes == mask;
    barrier.count += static_cast<u32>(__builtin_popcount(votes));
  }
  if (cta.order.on) cta.order.release(w, mask, barrier.clock);
  cta.progress++;
  if (mode != kArrive) {
    w.set_pc(w.group, w.now + 1);
    w.stands.push_back({mask, w.now, static_cast<int>(id), x[0]});
    w.runnable &= ~mask;
    w.stop = true;
  }
  const u32 expected = count != 0 ? count : live_threads(cta);
  if (barrier.arrived > expected)
    fail("barrier %u: %u threads have arrived, %u were expected", id, barrier.arrived, expected);
  if (barrier.arrived == expected) release(cta, static_cast<int>(id));
}

const Register registers[] = {{"bar", bar}};

}  // namespace

void recheck_barriers(Cta& cta) {
  for (int id = 0; id < 16; id++) {
    const NamedBarrier& barrier = cta.barriers[id];
    if (barrier.arrived == 0 || barrier.expected != 0) continue;
    if (barrier.arrived != live_threads(cta)) continue;
    release(cta, id);
  }
}

}  // namespace vm
