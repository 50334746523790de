// Shared memory: bounds, alignment, and whether conflicting accesses are ordered.
#include "state.h"

#include <algorithm>
#include <cstring>

namespace host {
namespace {

// Entries of a clock that are in use.
template <class Each>
void for_entries(Each each) {
  for (size_t i = 0; i < m.lanes.size(); ++i) each(i);
  for (size_t i = kMaxThreads; i < kMaxThreads + m.mbarriers.size(); ++i) each(i);
}

void join(Clock& to, const Clock& from) {
  for_entries([&](size_t i) { to.of[i] = std::max(to.of[i], from.of[i]); });
}

void check_in_flight(const Write& write, uint32_t offset, const char* what, int line) {
  if (write.copier >= 0)
    fail("%s (line %d): shared offset %u belongs to an asynchronous copy of thread %d that was not waited for", what, line, offset,
         write.copier);
}

uint32_t stamp_of(const Reads& reads, int lane) { return reads.each < 0 ? reads.stamp : m.each_lane[reads.each].of[lane]; }

// Lanes of `warp` whose read is not ordered before what the clock's owner does.
uint32_t unordered(int warp, const Reads& reads, const Clock& clock) {
  uint32_t left = 0;
  for (int lane = 0; lane < kWarp; ++lane)
    if (reads.lanes >> lane & 1 && stamp_of(reads, lane) >= clock.of[warp * kWarp + lane]) left |= 1u << lane;
  return left;
}

// Adds a read by `lanes` of a warp. Reads older than `joint` are forgotten: who follows this one follows those as well.
void remember(Reads& reads, uint32_t lanes, uint32_t joint) {
  if (reads.stamp <= m.before || reads.stamp < joint) reads.lanes = 0;
  if ((reads.lanes & ~lanes) == 0) {
    reads = {m.now, lanes, -1};
    return;
  }
  if (reads.stamp != m.now && reads.each < 0) {
    LaneStamps stamps;
    for (uint32_t& stamp : stamps.of) stamp = reads.stamp;
    reads.each = static_cast<int32_t>(m.each_lane.size());
    m.each_lane.push_back(stamps);
  }
  if (reads.each >= 0)
    for (int lane = 0; lane < kWarp; ++lane)
      if (lanes >> lane & 1) m.each_lane[reads.each].of[lane] = m.now;
  reads.lanes |= lanes;
  reads.stamp = m.now;
}

const char* name_writer(int writer) { return writer >= kMaxThreads ? "a copy on transaction barrier" : "thread"; }
int number_writer(int writer) { return writer >= kMaxThreads ? writer - kMaxThreads : writer; }

}  // namespace

uint8_t* shared_bytes(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what, int line) {
  if (address % alignment != 0) fail("%s (line %d): shared address %#x is not a multiple of %u", what, line, address, alignment);
  if (address < kSharedBase || address - kSharedBase + bytes > m.launch->smem_bytes)
    fail("%s (line %d): shared address %#x + %u leaves the block's %u B (from %#x)", what, line, address, bytes,
         m.launch->smem_bytes, kSharedBase);
  return dynamic_smem + (address - kSharedBase);
}

namespace {

// A plain access of a word by a lane follows all atomic additions to it.
void check_adds(uint32_t offset, const Lane& lane, const char* what, int line) {
  if (m.last_add[offset / 4] <= m.before) return;
  for (int w = 0; w < static_cast<int>(m.warps.size()); ++w) {
    const Reads& adds = m.adds[w][offset / 4];
    if (adds.stamp <= m.before || adds.stamp < m.warps[lane.index / kWarp].joint[w]) continue;
    uint32_t left = unordered(w, adds, lane.clock);
    if (w == lane.index / kWarp) left &= ~(1u << lane.index % kWarp);
    if (left != 0)
      fail("%s (line %d): shared offset %u was added to by warp %d (lanes %#x) with no barrier since", what, line, offset, w, left);
  }
}

}  // namespace

// A read by the given lanes of a warp.
void note_read(uint32_t address, uint32_t bytes, int warp, uint32_t lanes, const char* what, int line) {
  const auto& joint = m.warps[warp].joint;
  for (uint32_t offset = (address - kSharedBase) / 4 * 4; offset < address - kSharedBase + bytes; offset += 4) {
    const Write& write = m.writes[offset / 4];
    check_in_flight(write, offset, what, line);
    if (write.stamp <= m.before) fail("%s (line %d): shared offset %u was never written", what, line, offset);
    const bool old = write.stamp < (write.writer < kMaxThreads ? joint[write.writer / kWarp]
                                                               : m.warps[warp].joint_copies[write.writer - kMaxThreads]);
    for (int lane = 0; lane < kWarp && !old; ++lane)
      if (lanes >> lane & 1 && write.writer != warp * kWarp + lane &&
          write.stamp >= m.lanes[warp * kWarp + lane].clock.of[write.writer])
        fail("%s (line %d): shared offset %u was written by %s %d with no barrier since", what, line, offset,
             name_writer(write.writer), number_writer(write.writer));
    for (int lane = 0; lane < kWarp; ++lane)
      if (lanes >> lane & 1) check_adds(offset, m.lanes[warp * kWarp + lane], what, line);
    remember(m.reads[warp][offset / 4], lanes, joint[warp]);
  }
}

// A write by the running lane that follows what is in `clock`.
void note_write(uint32_t address, uint32_t bytes, const Clock& clock, const char* what, int line) {
  const int self = m.current->index, own_warp = self / kWarp;
  const bool generic = &clock == &m.current->clock;
  const auto& joint = m.warps[own_warp].joint;
  const char* order = generic ? "barrier" : "barrier and proxy fence";
  const uint32_t begin = (address - kSharedBase) / 4 * 4, end = address - kSharedBase + bytes;
  for (int w = 0; w < static_cast<int>(m.warps.size()); ++w) {
    uint32_t oldest = 0;  // acquired release of the warp's lanes; looked up when needed
    for (uint32_t offset = begin; offset < end; offset += 4) {
      const Reads& reads = m.reads[w][offset / 4];
      if (reads.stamp <= m.before || (generic && reads.stamp < joint[w])) continue;
      if (oldest == 0) oldest = *std::min_element(clock.of + w * kWarp, clock.of + (w + 1) * kWarp);
      if (reads.stamp < oldest) continue;
      uint32_t left = unordered(w, reads, clock);
      if (generic && w == own_warp) left &= ~(1u << self % kWarp);
      if (left != 0)
        fail("%s (line %d): shared offset %u was read by warp %d (lanes %#x) with no %s since", what, line, offset, w, left, order);
    }
  }
  for (uint32_t offset = begin; offset < end; offset += 4) {
    Write& write = m.writes[offset / 4];
    check_in_flight(write, offset, what, line);
    check_adds(offset, *m.current, what, line);
    if (write.stamp > m.before && !(generic && write.writer == self) && write.stamp >= clock.of[write.writer])
      fail("%s (line %d): shared offset %u was written by %s %d too, with no %s since", what, line, offset,
           name_writer(write.writer), number_writer(write.writer), order);
    write.writer = static_cast<int16_t>(self);
    write.stamp = m.now;
  }
}

void begin_copy(uint32_t address, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes / 4; ++i) m.writes[(address - kSharedBase) / 4 + i].copier = static_cast<int16_t>(m.current->index);
  std::memset(dynamic_smem + (address - kSharedBase), 0xff, bytes);
}

void note_landed(uint32_t address, uint32_t bytes, int writer) {
  for (uint32_t i = 0; i < bytes / 4; ++i) m.writes[(address - kSharedBase) / 4 + i] = {m.now, static_cast<int16_t>(writer), -1};
}

void release(Lane& lane, Clock& to) {
  lane.clock.of[lane.index] = ++m.now;
  join(to, lane.clock);
}

void acquire(Lane& lane, const Clock& from) { join(lane.clock, from); }

void note_joint_copies(const Lane& lane, int mbarrier) {
  const int w = lane.index / kWarp;
  uint32_t least = m.now;
  for (int l = 0; l < kWarp; ++l) least = std::min(least, m.lanes[w * kWarp + l].clock.of[kMaxThreads + mbarrier]);
  m.warps[w].joint_copies[mbarrier] = least;
}

void join_warps(const std::vector<Lane*>& lanes, const char* what, int line) {
  static Clock all;
  uint32_t present[kMaxWarps] = {}, joint[kMaxWarps] = {};
  std::memset(&all, 0, sizeof all);
  ++m.now;
  for (Lane* lane : lanes) {
    present[lane->index / kWarp] |= 1u << lane->index % kWarp;
    lane->clock.of[lane->index] = m.now;
    join(all, lane->clock);
  }
  for (Lane* lane : lanes) join(lane->clock, all);
  const size_t count = m.warps.size();
  for (size_t w = 0; w < count; ++w) {
    if (present[w] == 0) continue;
    if (present[w] != 0xffffffffu) fail("%s (line %d): only part of warp %zu (lanes %#x) takes part", what, line, w, present[w]);
    for (size_t v = 0; v < count; ++v) joint[v] = std::max(joint[v], m.warps[w].joint[v]);
    joint[w] = m.now;
  }
  for (size_t w = 0; w < count; ++w)
    if (present[w] != 0) std::memcpy(m.warps[w].joint, joint, sizeof joint);
}

void reset_order() {
  m.before = m.now++;
  m.each_lane.clear();
  for (Lane& lane : m.lanes) {
    for (uint32_t& entry : lane.clock.of) entry = m.now;
    lane.fenced = lane.clock;
  }
  for (Warp& warp : m.warps) {
    for (uint32_t& entry : warp.joint) entry = m.now;
    for (uint32_t& entry : warp.joint_copies) entry = m.now;
  }
}

uint32_t shared_address(const void* pointer, int line) {
  const auto* byte = static_cast<const uint8_t*>(pointer);
  if (byte < dynamic_smem || byte >= dynamic_smem + m.launch->smem_bytes)
    fail("shared_address (line %d): the object is not in shared memory", line);
  return kSharedBase + static_cast<uint32_t>(byte - dynamic_smem);
}

void load_shared(uint32_t address, void* target, uint32_t bytes, const char* what, int line) {
  note(what, line);
  const Lane& self = *m.current;
  const uint8_t* source = shared_bytes(address, bytes, bytes, what, self.line);
  note_read(address & ~3u, bytes < 4 ? 4 : bytes, self.index / kWarp, 1u << self.index % kWarp, what, self.line);
  std::memcpy(target, source, bytes);
}

void store_shared(uint32_t address, const void* source, uint32_t bytes, const char* what, int line) {
  note(what, line);
  uint8_t* target = shared_bytes(address, bytes, bytes, what, m.current->line);
  note_write(address, bytes, m.current->clock, what, m.current->line);
  std::memcpy(target, source, bytes);
}

uint32_t shared_update(uint32_t address, uint32_t value, bool adds, const char* what, int line) {
  note(what, line);
  const int self = m.current->index, own_warp = self / kWarp;
  uint8_t* target = shared_bytes(address, 4, 4, what, line);
  const uint32_t offset = address - kSharedBase;
  const Write& write = m.writes[offset / 4];
  check_in_flight(write, offset, what, line);
  if (write.stamp <= m.before) fail("%s (line %d): shared offset %u was never written", what, line, offset);
  if (write.writer != self && write.stamp >= m.current->clock.of[write.writer])
    fail("%s (line %d): shared offset %u was written by %s %d with no barrier since", what, line, offset, name_writer(write.writer),
         number_writer(write.writer));
  for (int w = 0; w < static_cast<int>(m.warps.size()); ++w) {
    const Reads& reads = m.reads[w][offset / 4];
    if (reads.stamp <= m.before || reads.stamp < m.warps[own_warp].joint[w]) continue;
    uint32_t left = unordered(w, reads, m.current->clock);
    if (w == own_warp) left &= ~(1u << self % kWarp);
    if (left != 0)
      fail("%s (line %d): shared offset %u was read by warp %d (lanes %#x) with no barrier since", what, line, offset, w, left);
  }
  remember(m.adds[own_warp][offset / 4], 1u << self % kWarp, m.warps[own_warp].joint[own_warp]);
  m.last_add[offset / 4] = m.now;
  uint32_t before;
  std::memcpy(&before, target, 4);
  const uint32_t after = adds ? before + value : before | value;
  std::memcpy(target, &after, 4);
  return before;
}

}  // namespace host
