// Asynchronous copies of at most 16 bytes a lane, and fences.
#include <algorithm>

#include "machine.h"

namespace vm {
namespace {

bool has_earlier_copy(const Cta& cta, size_t index) {
  for (size_t n = 0; n < index; n++)
    if (cta.pending[n].kind == Pending::kCopy && cta.pending[n].bytes != 0 &&
        cta.pending[n].thread == cta.pending[index].thread)
      return true;
  return false;
}

void land(Cta& cta, const Pending& p) {
  u8* at = shared_bytes(cta, p.destination, p.bytes, "asynchronous copy");
  if (p.copied != 0) {
    const Warp& w = cta.warps[p.thread / kLanes];
    std::memcpy(at, global_source(cta, p.source, p.copied, w.grid_waited & p.lane_bit), p.copied);
  }
  std::memset(at + p.copied, 0, p.bytes - p.copied);
  std::memset(cta.shared_valid.data() + (at - cta.shared.data()), 1, p.bytes);
  cta.counters[kCopiedBytes] += p.bytes;
}

// Does what is pending at `index`; false where a copy of the thread has to land first. The entry is then empty.
bool finish(Cta& cta, size_t index) {
  Pending& p = cta.pending[index];
  if (p.kind == Pending::kArrive) {
    if (has_earlier_copy(cta, index)) return false;
    if (cta.order.on)
      cta.order.release_copies(p.thread / kLanes, p.thread % kLanes, p.number, cta.mbarriers[p.barrier].arriving);
    arrive(cta, p.barrier, 1, 0, "cp.async.mbarrier.arrive");
    p.barrier = 0;
  } else {
    land(cta, p);
    p.bytes = 0;
  }
  cta.progress++;
  return true;
}

bool is_empty(const Pending& p) { return p.kind == Pending::kArrive ? p.barrier == 0 : p.bytes == 0; }

void sweep(Cta& cta) {
  cta.pending.erase(std::remove_if(cta.pending.begin(), cta.pending.end(), is_empty), cta.pending.end());
}

bool at_once(Cta& cta) { return cta.launch->seed != 0 && cta.random.below(3) == 0; }

// Until it lands the destination holds nothing that may be read.
void issue(Cta& cta, Pending p, const char* what) {
  Warp& w = cta.warps[p.thread / kLanes];
  const u32 lane = p.thread % kLanes;
  if (p.kind == Pending::kArrive) {
    if (cta.order.on) p.number = cta.order.copies_issued(w.index, lane);
  } else {
    u8* at = shared_bytes(cta, p.destination, p.bytes, what);
    const u32 offset = p.destination - cta.shared_base;
    if (cta.order.on) p.number = cta.order.issue_copy(w, lane, offset, p.bytes);
    std::memset(at, 0xff, p.bytes);
    std::memset(cta.shared_valid.data() + (at - cta.shared.data()), 0, p.bytes);
    if (p.copied != 0) global_source(cta, p.source, p.copied, w.grid_waited & p.lane_bit);
  }
  cta.pending.push_back(p);
  cta.progress++;
  if (at_once(cta) && finish(cta, cta.pending.size() - 1)) cta.pending.pop_back();
}

// Shared address, global address, bytes that are copied (the rest is zeros); imm is the size.
void copy(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  Cta& cta = *w.cta;
  const u32 size = static_cast<u32>(i.imm);
  each_lane(mask, [&](int l) {
    cta.fault_lane = static_cast<u32>(l);
    const u32 thread = static_cast<u32>(w.thread(l)), destination = narrow_address(w, x, l), copied = w.row(x[6])[l];
    const u64 source = wide_address(w, x + 3, l);
    if (copied > size) fail("cp.async: %u bytes of a source for %u bytes", copied, size);
    if (destination % size != 0 || source % size != 0) fail("cp.async of %u bytes: an address is misaligned", size);
    issue(cta, {Pending::kCopy, thread, cta.commit_groups[thread], destination, size, copied, source, 0, w.now,
                1u << l}, "cp.async");
  });
}

void commit(Warp& w, const Ins&, u32 mask) {
  Cta& cta = *w.cta;
  each_lane(mask, [&](int l) {
    cta.commit_groups[w.thread(l)]++;
    if (cta.order.on)
      cta.copies_committed[w.thread(l)].push_back(cta.order.copies_issued(w.index, static_cast<u32>(l)));
  });
}

// imm is how many groups may remain, -1: not even the open one.
void wait_copies(Warp& w, const Ins& i, u32 mask) {
  Cta& cta = *w.cta;
  for (size_t n = 0; n < cta.pending.size(); n++) {
    const Pending& p = cta.pending[n];
    if (p.kind != Pending::kCopy || p.bytes == 0 || p.thread / kLanes != w.index || !(mask & p.lane_bit)) continue;
    const u32 committed = cta.commit_groups[p.thread];
    if (i.imm < 0 || p.group + static_cast<u32>(i.imm) < committed) finish(cta, n);
  }
  sweep(cta);
  if (!cta.order.on) return;
  each_lane(mask, [&](int l) {
    const u32 lane = static_cast<u32>(l);
    const std::vector<u32>& marks = cta.copies_committed[w.thread(l)];
    const size_t left = static_cast<size_t>(std::max(i.imm, 0));
    if (i.imm < 0)
      cta.order.wait_copies(w, lane, cta.order.copies_issued(w.index, lane));
    else if (marks.size() > left)
      cta.order.wait_copies(w, lane, marks[marks.size() - 1 - left]);
  });
}

// An arrival once the thread's copies so far have landed; imm 1: the barrier's count does not include it yet.
void arrive_after_copies(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  Cta& cta = *w.cta;
  each_lane(mask, [&](int l) {
    const u32 address = narrow_address(w, x, l);
    mbarrier_bytes(w, l, cta, address, "cp.async.mbarrier.arrive");
    if (i.imm == 1) expect_one_more(cta, address);
    issue(cta, {Pending::kArrive, static_cast<u32>(w.thread(l)), 0, 0, 0, 0, 0, address, w.now, 1u << l}, "");
  });
}

void fence_proxy(Warp& w, const Ins&, u32 mask) {
  if (w.cta->order.on) w.cta->order.fence_proxy(w, mask);
}

// imm is the scope: 0 the CTA, 1 the device and beyond.
void fence(Warp& w, const Ins& i, u32 mask) {
  if (w.cta->order.on) w.cta->order.fence(w, mask, static_cast<u32>(i.imm));
}

const Register registers[] = {{"copy_async", copy},
                              {"copy_async_commit", commit},
                              {"copy_async_wait", wait_copies},
                              {"copy_async_arrive", arrive_after_copies},
                              {"fence", fence},
                              {"fence_proxy", fence_proxy}};

}  // namespace

bool complete_some(Cta& cta, bool all) {
  bool any = false;
  const size_t chosen = all || cta.pending.empty() ? 0 : cta.random.below(static_cast<u32>(cta.pending.size()));
  for (size_t n = 0; n < cta.pending.size(); n++)
    if (all || n == chosen || cta.random.below(4) == 0) any |= finish(cta, n);
  sweep(cta);
  any |= complete_bulk(cta, all);
  return any;
}

}  // namespace vm
