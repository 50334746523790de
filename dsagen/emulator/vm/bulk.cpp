// Bulk and tensor copies, reductions by them, and the asynchronous stores of st.async and red.async.
#include <algorithm>

#include "counters.h"
#include "numerics.h"
#include "tensor_map.h"

namespace vm {
namespace {

enum Flag : u32 { kMulticast = 1, kOwnCta = 2, kReduces = 4 };
// Where the flags hold a reduction, from this bit on.
constexpr u32 kReductionShift = 8;
constexpr u32 kUnit = 16, kTensorAlignment = 128;

BulkWork begin(const Warp& w, int l, BulkWork::Kind kind) {
  w.cta->fault_lane = static_cast<u32>(l);
  BulkWork work{};
  work.kind = kind;
  work.thread = static_cast<u32>(w.thread(l));
  work.pc = w.now;
  work.waited = (w.grid_waited >> l & 1) != 0;
  return work;
}

void require_units(u32 bytes, u64 destination, u64 source) {
  if (bytes == 0 || bytes % kUnit != 0) fail("cp.async.bulk: %u bytes are no positive multiple of 16", bytes);
  if (destination % kUnit != 0 || source % kUnit != 0) fail("cp.async.bulk: an address is no multiple of 16");
}

// The pieces of what lies at `shared` on one side: each(shared address, global address or 0, bytes).
template <class F>
void each_of(const BulkWork& work, u32 shared, F f) {
  if (work.box)
    each_piece(*work.box, shared, f);
  else
    f(shared, work.memory, work.bytes);
}

// ---- doing it ----

void take_source(Cta& cta, BulkWork& work) {
  if (work.has_read) return;
  const u8* from = shared_bytes(cta, work.source, work.bytes, "bulk copy");
  work.data.assign(from, from + work.bytes);
  work.has_read = true;
}

// What lies outside of a tensor, of elements of any size, as an H200 has it.
constexpr u16 kFillNan = 0x7ff7;

void fill(u8* at, u32 bytes, bool nan) {
  if (!nan)
    std::memset(at, 0, bytes);
  else
    for (u32 n = 0; n < bytes; n += sizeof kFillNan) std::memcpy(at + n, &kFillNan, sizeof kFillNan);
}

void round_to_tf32(u8* at, u32 bytes) {
  for (u32 n = 0; n < bytes; n += 4) {
    float x;
    std::memcpy(&x, at + n, 4);
    const u32 bits = encode(kFormats[kTF32], x, kNearestEven, false, false) << 13;
    std::memcpy(at + n, &bits, 4);
  }
}

void load(Cta& cta, const BulkWork& work) {
  Cta& target = *work.target;
  each_of(work, work.destination, [&](u32 shared, u64 memory, u32 bytes) {
    u8* at = target.shared.data() + (shared - target.shared_base);
    if (memory == 0) return fill(at, bytes, work.box->fills_with_nan);
    std::memcpy(at, global_source(cta, memory, bytes, work.waited), bytes);
    if (work.box && work.box->rounds) round_to_tf32(at, bytes);
  });
}

void reduce_all(u8* at, const u8* by, u32 bytes, u32 flags) {
  const u32 size = 1u << (flags >> 3 & 3);
  for (u32 n = 0; n < bytes; n += size) reduce(at + n, by + n, flags);
}

void store(Cta& cta, BulkWork& work) {
  take_source(cta, work);
  each_of(work, work.source, [&](u32 shared, u64 memory, u32 bytes) {
    if (memory == 0) return;
    u8* at = global_bytes(cta, memory, bytes, true, work.waited);
    const u8* from = work.data.data() + (shared - work.source);
    if (work.reduces)
      reduce_all(at, from, bytes, work.reduction);
    else
      std::memcpy(at, from, bytes);
  });
}

// The agent of the mbarrier that what the work does is of.
u32 agent_of(const Cta& cta, const BulkWork& work) {
  const MbarrierClocks& clocks = work.target->mbarriers[work.barrier];
  const bool far = work.target != &cta && work.kind != BulkWork::kLoad;
  return far ? clocks.far_agent : clocks.agent;
}

// Into shared memory, which completes on an mbarrier beside it.
void land(Cta& cta, BulkWork& work) {
  Cta& target = *work.target;
  if (target.finished())
    fail("bytes of a bulk copy come to %s, which has ended", cta_name(*cta.launch, target.linear).c_str());
  if (work.kind == BulkWork::kExchange) take_source(cta, work);
  const u32 offset = work.destination - target.shared_base;
  u8* at = target.shared.data() + offset;
  if (work.kind == BulkWork::kLoad)
    load(cta, work);
  else if (work.reduces)
    reduce_all(at, work.data.data(), work.bytes, work.reduction);
  else
    std::memcpy(at, work.data.data(), work.bytes);
  std::memset(target.shared_valid.data() + offset, 1, work.bytes);
  if (cta.order.on) {
    const u32 agent = agent_of(cta, work), time = target.mbarriers[work.barrier].phases + 1;
    if (work.kind == BulkWork::kExchange)
      cta.order.end_shared_bulk(work.source - cta.shared_base, work.bytes, target.linear, agent, time, work.pc);
    if (work.reduces)
      target.order.end_shared_bulk(offset, work.bytes, target.linear, agent, time, work.pc);
    else
      target.order.land_bulk(offset, work.bytes, agent, time);
  }
  arrive(target, work.barrier, 0, -static_cast<i32>(work.bytes), "complete_tx of a bulk copy");
}

void finish(Cta& cta, size_t index) {
  BulkWork work = std::move(cta.bulk[index]);
  cta.bulk[index].done = true;
  try {
    if (work.kind == BulkWork::kStore)
      store(cta, work);
    else
      land(cta, work);
  } catch (Fault& fault) {
    fault.text += "\n  of the copy at " + place(cta, work.pc);
    throw;
  }
  cta.counters[kCopiedBytes] += work.bytes;
  cta.progress++;
}

void sweep(Cta& cta) {
  cta.bulk.erase(std::remove_if(cta.bulk.begin(), cta.bulk.end(), [](const BulkWork& work) { return work.done; }),
                 cta.bulk.end());
}

// ---- asking for it ----

void queue(Cta& cta, BulkWork work) {
  cta.bulk.push_back(std::move(work));
  cta.progress++;
  if (cta.launch->seed == 0 || cta.random.below(3) != 0) return;
  finish(cta, cta.bulk.size() - 1);
  sweep(cta);
}

void note(const Cta& cta, const BulkWork& work) {
  if (cta.meter == nullptr) return;
  cta.meter->note(kBulkBytes, work.bytes);
  if (work.box) cta.meter->note(kBulkBoxes, 1);
  if (work.kind == BulkWork::kExchange || work.kind == BulkWork::kWords) cta.meter->note(kClusterBytes, work.bytes);
}

// What is read of global memory, or written there.
void require_global(Warp& w, int l, const BulkWork& work, u32 shared, Touch touch) {
  Cta& cta = *w.cta;
  const bool write = touch != Touch::kRead;
  each_of(work, shared, [&](u32, u64 memory, u32 bytes) {
    if (memory == 0) return;
    const Region* region = nullptr;
    global_bytes(cta, memory, bytes, write, work.waited, &region);
    if (cta.meter != nullptr) cta.meter->bulk(memory, bytes, write);
    if (!cta.order.on || !region->writable) return;
    const auto number = static_cast<u32>(region - cta.regions->data());
    cta.order.global_bulk(w, static_cast<u32>(l), number, memory - region->begin, bytes, touch, work.group + 1);
  });
}

// What is read of the own shared memory, until the agent's time.
void require_source(Warp& w, int l, const BulkWork& work, u32 cta_of_agent, u32 agent, u32 time) {
  Cta& cta = *w.cta;
  require_own(cta, work.source, "cp.async.bulk");
  shared_bytes(cta, work.source, work.bytes, "cp.async.bulk");
  const u32 offset = work.source - cta.shared_base;
  if (!all_valid(cta.shared_valid.data() + offset, work.bytes))
    fail("cp.async.bulk of %u bytes from shared byte %u on, some of which nobody has written (or an asynchronous copy "
         "has not been waited for)", work.bytes, offset);
  if (cta.order.on)
    cta.order.share_bulk(w, static_cast<u32>(l), cta.order, offset, work.bytes, cta_of_agent, agent, time, kAsyncProxy);
}

// Until it lands the destination holds nothing that may be read.
void issue_to_shared(Warp& w, int l, BulkWork work, const char* what) {
  Cta& target = *work.target;
  const u32 lane = static_cast<u32>(l), offset = work.destination - target.shared_base;
  u8* at = shared_bytes(target, work.destination, work.bytes, what);
  u8* valid = target.shared_valid.data() + offset;
  mbarrier_bytes(w, l, target, work.barrier, what);
  const bool asynchronous = work.kind != BulkWork::kWords;
  const u32 proxy = asynchronous ? kAsyncProxy : 0;
  if (asynchronous) require_visible(w, l, target, work.barrier);
  const u32 agent = agent_of(*w.cta, work);
  Order& order = w.cta->order;
  if (work.kind == BulkWork::kExchange) require_source(w, l, work, target.linear, agent, kInFlight);
  if (work.reduces) {
    if (!all_valid(valid, work.bytes)) fail("%s: a reduction of bytes that nobody has written", what);
    if (order.on)
      order.share_bulk(w, lane, target.order, offset, work.bytes, target.linear, agent, kInFlight, kStrong | proxy);
  } else {
    if (order.on) order.issue_bulk(w, lane, target.order, offset, work.bytes, proxy);
    std::memset(at, 0xff, work.bytes);
    std::memset(valid, 0, work.bytes);
  }
  note(*w.cta, work);
  queue(*w.cta, std::move(work));
}

void set_reduction(BulkWork& work, const Ins& i) {
  work.reduces = (i.flags & kReduces) != 0;
  work.reduction = (i.flags >> kReductionShift & 15) << 16 | (i.flags >> (kReductionShift + 4) & 15) << 20 |
                   (i.flags >> (kReductionShift + 8) & 3) << 3 | 1u << 5;
}

// The work for the CTA of the destination, or at the same place of each that the mask names.
void issue_load(Warp& w, int l, const Ins& i, BulkWork work, u32 ranks) {
  Cta& cta = *w.cta;
  const char* const what = "cp.async.bulk";
  if ((i.flags & kOwnCta) != 0) require_own(cta, work.destination, what);
  if (work.destination >> kRankShift != work.barrier >> kRankShift)
    fail("cp.async.bulk: the destination lies in the CTA of rank %u, the mbarrier in that of rank %u",
         work.destination >> kRankShift, work.barrier >> kRankShift);
  require_global(w, l, work, work.destination, Touch::kRead);
  if ((i.flags & kMulticast) == 0) {
    work.target = &owner_of(cta, work.destination, what);
    return issue_to_shared(w, l, std::move(work), what);
  }
  const u32 count = static_cast<u32>(cta.cluster->members.size());
  if (ranks == 0 || ranks >> count != 0)
    fail("cp.async.bulk: a multicast to the ranks %#x of a cluster of %u CTAs", ranks, count);
  for (u32 m = ranks; m != 0; m &= m - 1) {
    const u32 rank = static_cast<u32>(__builtin_ctz(m)) << kRankShift, low = (1u << kRankShift) - 1;
    BulkWork one = work;
    one.destination = (work.destination & low) | rank;
    one.barrier = (work.barrier & low) | rank;
    one.target = &owner_of(cta, one.destination, what);
    issue_to_shared(w, l, std::move(one), what);
  }
}

void issue_store(Warp& w, int l, BulkWork work) {
  Cta& cta = *w.cta;
  work.group = cta.bulk_groups[work.thread];
  const u32 agent = cta.order.reads_of_groups(w.index);
  require_source(w, l, work, cta.linear, agent, work.group + 1);
  require_global(w, l, work, work.source, work.reduces ? Touch::kStrong : Touch::kWrite);
  note(cta, work);
  queue(cta, std::move(work));
}

// Destination, source, bytes, mbarrier, ranks.
void copy_bulk(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    BulkWork work = begin(w, l, BulkWork::kLoad);
    work.destination = narrow_address(w, x, l);
    work.memory = wide_address(w, x + 3, l);
    work.bytes = w.row(x[6])[l];
    work.barrier = narrow_address(w, x + 7, l);
    require_units(work.bytes, work.destination, work.memory);
    issue_load(w, l, i, std::move(work), w.row(x[10])[l] & 0xffff);
  });
}

// Destination, source, bytes.
void copy_bulk_store(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    BulkWork work = begin(w, l, BulkWork::kStore);
    work.memory = wide_address(w, x, l);
    work.source = narrow_address(w, x + 3, l);
    work.bytes = w.row(x[6])[l];
    set_reduction(work, i);
    require_units(work.bytes, work.memory, work.source);
    issue_store(w, l, std::move(work));
  });
}

// Destination, source, bytes, mbarrier.
void copy_bulk_exchange(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    BulkWork work = begin(w, l, BulkWork::kExchange);
    work.destination = narrow_address(w, x, l);
    work.source = narrow_address(w, x + 3, l);
    work.bytes = w.row(x[6])[l];
    work.barrier = narrow_address(w, x + 7, l);
    set_reduction(work, i);
    require_units(work.bytes, work.destination, work.source);
    if (work.destination >> kRankShift != work.barrier >> kRankShift)
      fail("cp.async.bulk: the destination and the mbarrier lie in different CTAs");
    work.target = &owner_of(*w.cta, work.destination, "cp.async.bulk");
    issue_to_shared(w, l, std::move(work), "cp.async.bulk");
  });
}

std::shared_ptr<const Box> box_of(Warp& w, int l, const u16* map, const u16* coordinates, u32 rank, bool stores = false) {
  i32 at[5] = {};
  for (u32 n = 0; n < rank; n++) at[n] = static_cast<i32>(w.row(coordinates[n])[l]);
  return std::make_shared<const Box>(read_box(w, l, wide_address(w, map, l), at, rank, stores));
}

void require_tensor_alignment(u32 address) {
  if (address % kTensorAlignment != 0)
    fail("cp.async.bulk.tensor: shared address %#x is no multiple of %u", address, kTensorAlignment);
}

// Destination, map, mbarrier, ranks, coordinates; imm is how many of these.
void copy_tensor(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    BulkWork work = begin(w, l, BulkWork::kLoad);
    work.destination = narrow_address(w, x, l);
    work.barrier = narrow_address(w, x + 6, l);
    work.box = box_of(w, l, x + 3, x + 10, static_cast<u32>(i.imm));
    // Those outside of the tensor count as well.
    work.bytes = work.box->bytes();
    require_tensor_alignment(work.destination);
    issue_load(w, l, i, std::move(work), w.row(x[9])[l] & 0xffff);
  });
}

// Map, source, coordinates.
void copy_tensor_store(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    BulkWork work = begin(w, l, BulkWork::kStore);
    work.source = narrow_address(w, x + 3, l);
    work.box = box_of(w, l, x, x + 6, static_cast<u32>(i.imm), true);
    work.bytes = work.box->bytes();
    require_tensor_alignment(work.source);
    for (u32 n = 0; n < work.box->rank; n++)
      if (work.box->at[n] < 0)
        fail("cp.async.bulk.tensor: a store at coordinate %d of dimension %u, which a device answers with an illegal "
             "instruction: only loads may begin ahead of the tensor", work.box->at[n], n);
    work.reduces = (i.flags & kReduces) != 0;
    if (work.reduces) work.reduction = reduction_flags(*work.box, i.flags >> kReductionShift & 15);
    issue_store(w, l, std::move(work));
  });
}

// Map and coordinates (imm of them), or with imm 0 an address and bytes: checked, and nothing else.
void prefetch(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  each_lane(mask, [&](int l) {
    if (i.imm != 0)
      box_of(w, l, x, x + 3, static_cast<u32>(i.imm));
    else
      require_units(w.row(x[3])[l], 0, wide_address(w, x, l));
  });
}

void commit(Warp& w, const Ins&, u32 mask) {
  each_lane(mask, [&](int l) { w.cta->bulk_groups[w.thread(l)]++; });
}

// imm is how many groups may remain; flags 1: of the others only the sources need have been read.
void wait_groups(Warp& w, const Ins& i, u32 mask) {
  Cta& cta = *w.cta;
  const bool read_only = (i.flags & 1) != 0;
  const u32 may_remain = static_cast<u32>(i.imm);
  for (size_t n = 0; n < cta.bulk.size(); n++) {
    BulkWork& work = cta.bulk[n];
    if (work.kind != BulkWork::kStore || work.done || work.thread / kLanes != w.index) continue;
    if (!(mask >> work.thread % kLanes & 1) || work.group + may_remain >= cta.bulk_groups[work.thread]) continue;
    if (read_only)
      take_source(cta, work);
    else
      finish(cta, n);
  }
  sweep(cta);
  if (!cta.order.on) return;
  each_lane(mask, [&](int l) {
    const u32 committed = cta.bulk_groups[w.thread(l)];
    if (committed > may_remain) cta.order.wait_groups(w, static_cast<u32>(l), committed - may_remain, !read_only);
  });
}

// Address, mbarrier, values; flags: how many are in bits 0-1 and 2 (as kReduces is), the reduction's fields above.
void store_async(Warp& w, const Ins& i, u32 mask) {
  VM_OPERANDS;
  const char* const what = (i.flags & kReduces) != 0 ? "red.async" : "st.async";
  const u32 count = static_cast<u32>(i.imm), size = 1u << (i.flags >> (kReductionShift + 8) & 3);
  each_lane(mask, [&](int l) {
    BulkWork work = begin(w, l, BulkWork::kWords);
    work.destination = narrow_address(w, x, l);
    work.barrier = narrow_address(w, x + 3, l);
    work.bytes = count * size;
    work.has_read = true;
    set_reduction(work, i);
    if (work.destination % work.bytes != 0) fail("%s of %u bytes: a misaligned address", what, work.bytes);
    if (work.destination >> kRankShift != work.barrier >> kRankShift)
      fail("%s: the destination and the mbarrier lie in different CTAs", what);
    for (u32 n = 0; n < count; n++) {
      const u64 value = size == 8 ? get<u64>(w.row(x[6 + n]), l) : w.row(x[6 + n])[l];
      const auto* bytes = reinterpret_cast<const u8*>(&value);
      work.data.insert(work.data.end(), bytes, bytes + size);
    }
    work.target = &owner_of(*w.cta, work.destination, what);
    issue_to_shared(w, l, std::move(work), what);
  });
}

const Register registers[] = {{"copy_bulk", copy_bulk},
                              {"copy_bulk_store", copy_bulk_store},
                              {"copy_bulk_exchange", copy_bulk_exchange},
                              {"copy_bulk_tensor", copy_tensor},
                              {"copy_bulk_tensor_store", copy_tensor_store},
                              {"copy_bulk_prefetch", prefetch},
                              {"copy_bulk_commit", commit},
                              {"copy_bulk_wait", wait_groups},
                              {"copy_words", store_async}};

}  // namespace

bool complete_bulk(Cta& cta, bool all) {
  if (cta.bulk.empty()) return false;
  const size_t chosen = all ? 0 : cta.random.below(static_cast<u32>(cta.bulk.size()));
  bool any = false;
  // What completes may end others' waits, but it adds nothing here.
  for (size_t n = 0; n < cta.bulk.size(); n++) {
    if (!all && n != chosen && cta.random.below(4) != 0) continue;
    finish(cta, n);
    any = true;
  }
  sweep(cta);
  return any;
}

void end_bulk(Cta& cta) {
  for (size_t n = 0; n < cta.bulk.size(); n++) {
    const BulkWork& work = cta.bulk[n];
    const bool reads = (work.kind == BulkWork::kStore || work.kind == BulkWork::kExchange) && !work.has_read;
    if (reads)
      fail("the CTA ends while a bulk copy still reads its shared memory (%s): it has to wait for that",
           place(cta, work.pc).c_str());
    if (work.kind == BulkWork::kStore) finish(cta, n);
  }
  sweep(cta);
  for (const Cta* member : cta.cluster->members)
    for (const BulkWork& work : member->bulk)
      if (work.target == &cta)
        fail("the CTA ends while bytes of a bulk copy of %s are on the way to its shared memory (%s)",
             cta_name(*cta.launch, member->linear).c_str(), place(cta, work.pc).c_str());
}

}  // namespace vm
