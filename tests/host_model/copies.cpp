// Global memory, asynchronous copies, transaction barriers.
#include "state.h"

#include <cstring>
#include <sys/mman.h>
#include <utility>

namespace host {

// ---- global memory --------------------------------------------------------------------------------------------------

void check_global(const void* pointer, uint32_t bytes, uint32_t alignment, const char* what, int line) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (address % alignment != 0) fail("%s (line %d): global address %#lx is not a multiple of %u", what, line, address, alignment);
  const HostRegion* nearest = nullptr;
  const auto distance = [&](const HostRegion& r) { return address < r.begin ? r.begin - address : address - r.begin; };
  for (unsigned i = 0; i < m.launch->region_count; ++i) {
    const HostRegion& r = m.launch->regions[i];
    if (address >= r.begin && address + bytes <= r.end) {
      if (r.predecessors && !m.dependency_met) fail("%s (line %d): reads %s before the dependency wait", what, line, r.name);
      return;
    }
    if (nearest == nullptr || distance(r) < distance(*nearest)) nearest = &r;
  }
  fail("%s (line %d): global address %#lx is in no tensor; nearest is %s (%llu B), at byte %lld of it", what, line, address,
       nearest ? nearest->name : "none", nearest ? nearest->end - nearest->begin : 0,
       nearest ? static_cast<long long>(address - nearest->begin) : 0);
}

void protect_predecessors(bool closed) {
  constexpr uint64_t kPage = 4096;
  for (unsigned i = 0; i < m.launch->region_count; ++i) {
    const HostRegion& r = m.launch->regions[i];
    const uint64_t begin = r.begin / kPage * kPage;
    if (r.predecessors) mprotect(reinterpret_cast<void*>(begin), r.end - begin, closed ? PROT_NONE : PROT_READ);
  }
}

void load_global(const void* address, void* target, uint32_t bytes, const char* what, int line) {
  note(what, line);
  check_global(address, bytes, bytes, what, line);
  std::memcpy(target, address, bytes);
}

void store_global(void* address, const void* source, uint32_t bytes, const char* what, int line) {
  note(what, line);
  check_global(address, bytes, bytes, what, line);
  std::memcpy(address, source, bytes);
}

// ---- copies of a thread ---------------------------------------------------------------------------------------------

static void copy_of_thread(uint32_t target, const void* source, uint32_t bytes, uint32_t size, const char* what, int line) {
  note(what, line);
  if (bytes != 0 && bytes != size) fail("%s (line %d): %u bytes, must be 0 or %u", what, line, bytes, size);
  check_global(source, size, size, what, line);
  shared_bytes(target, size, size, what, line);
  note_write(target, size, m.current->clock, what, line);
  begin_copy(target, size);
  m.current->open.push_back({target, static_cast<const uint8_t*>(source), bytes, size, line});
}

void copy_async(uint32_t target, const void* source, uint32_t bytes, int line) {
  copy_of_thread(target, source, bytes, 16, "copy_async_16", line);
}

void copy_async_8(uint32_t target, const void* source, uint32_t bytes, int line) {
  copy_of_thread(target, source, bytes, 8, "copy_async_8", line);
}

void copy_async_4(uint32_t target, const void* source, uint32_t bytes, int line) {
  copy_of_thread(target, source, bytes, 4, "copy_async_4", line);
}

void copy_async_commit() {
  m.current->groups.push_back(std::move(m.current->open));
  m.current->open.clear();
}

void copy_async_wait(int pending, int line) {
  note("copy_async_wait", line);
  auto& groups = m.current->groups;
  const int landing = static_cast<int>(groups.size()) - pending;
  if (landing <= 0) return;
  for (int i = 0; i < landing; ++i)
    for (const Copy& copy : groups[i]) {
      uint8_t* to = dynamic_smem + (copy.target - kSharedBase);
      std::memset(to, 0, copy.taken);
      std::memcpy(to, copy.source, copy.bytes);
      note_landed(copy.target, copy.taken, m.current->index);
    }
  groups.erase(groups.begin(), groups.begin() + landing);
}

// ---- transaction barriers -------------------------------------------------------------------------------------------

namespace {

int mbarrier_at(uint32_t address, const char* what, int line) {
  for (size_t i = 0; i < m.mbarriers.size(); ++i)
    if (m.mbarriers[i].address == address) {
      const Mbarrier& b = m.mbarriers[i];
      const Write& init = m.writes[(address - kSharedBase) / 4];
      if (b.owner != m.current->index && init.stamp >= m.current->clock.of[b.owner])
        fail("%s (line %d): thread %d initialised the transaction barrier with no barrier since", what, line, b.owner);
      return static_cast<int>(i);
    }
  fail("%s (line %d): no transaction barrier was initialised at shared offset %u", what, line, address - kSharedBase);
}

void complete_if_due(Mbarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase ^= 1;
  b.pending = static_cast<int>(b.count);
  b.completed = b.clock;
  for (Lane* lane : b.waiting) set_ready(*lane, true);
  b.waiting.clear();
}

void arrive_for_copies(int mbarrier) {
  Mbarrier& b = m.mbarriers[mbarrier];
  if (b.pending == 0) fail("an arrival for copies: more than %u arrivals in a phase", b.count);
  b.clock.of[kMaxThreads + mbarrier] = ++m.now;
  --b.pending;
  complete_if_due(b);
}

}  // namespace

void mbarrier_init(uint32_t address, uint32_t count, int line) {
  constexpr const char* what = "mbarrier_init";
  note(what, line);
  shared_bytes(address, 8, 8, what, line);
  if (count == 0 || count >= 1u << 20) fail("%s (line %d): count %u", what, line, count);
  for (const Mbarrier& b : m.mbarriers)
    if (b.address == address) fail("%s (line %d): initialised twice", what, line);
  if (m.mbarriers.size() == kMbarriersMax) fail("%s (line %d): the model has %d transaction barriers", what, line, kMbarriersMax);
  note_write(address, 8, m.current->clock, what, line);
  m.mbarriers.push_back({address, count, 0, static_cast<int>(count), 0, m.current->index, false, {}, {}, {}});
}

void fence_mbarrier_init(int line) {
  note("fence_mbarrier_init", line);
  for (Mbarrier& b : m.mbarriers) b.visible |= b.owner == m.current->index;
}

void mbarrier_arrive_expect(uint32_t address, uint32_t bytes, int line) {
  constexpr const char* what = "mbarrier_arrive_expect";
  note(what, line);
  Mbarrier& b = m.mbarriers[mbarrier_at(address, what, line)];
  if (b.pending == 0) fail("%s (line %d): more than %u arrivals in a phase", what, line, b.count);
  release(*m.current, b.clock);
  --b.pending;
  b.bytes += bytes;
  complete_if_due(b);
}

void mbarrier_arrive(uint32_t address, int line) { mbarrier_arrive_expect(address, 0, line); }

// What the thread wrote otherwise is not released by this.
void mbarrier_arrive_after_copies(uint32_t address, int line) {
  constexpr const char* what = "mbarrier_arrive_after_copies";
  note(what, line);
  const int index = mbarrier_at(address, what, line), arrival = static_cast<int>(m.arrivals.size());
  auto& groups = m.current->groups;
  groups.push_back(std::move(m.current->open));
  m.current->open.clear();
  m.arrivals.push_back(0);
  for (const auto& group : groups)
    for (const Copy& copy : group) {
      m.free_copies.push_back({copy, index, arrival});
      ++m.arrivals.back();
    }
  groups.clear();
  if (m.arrivals.back() == 0) arrive_for_copies(index);
}

void mbarrier_wait(uint32_t address, uint32_t parity, int line) {
  constexpr const char* what = "mbarrier_wait";
  note(what, line);
  if (parity > 1) fail("%s (line %d): parity %u", what, line, parity);
  const int index = mbarrier_at(address, what, line);
  while (m.mbarriers[index].phase == parity) {
    m.mbarriers[index].waiting.push_back(m.current);
    block_current(what, line);
  }
  acquire(*m.current, m.mbarriers[index].completed);
  note_joint_copies(*m.current, index);
}

void fence_proxy_async(int line) {
  note("fence_proxy_async", line);
  m.current->fenced = m.current->clock;
  m.current->fenced.of[m.current->index] = ++m.now;
}

void copy_bulk(uint32_t target, const void* source, uint32_t bytes, uint32_t mbarrier, int line) {
  constexpr const char* what = "copy_bulk";
  note(what, line);
  if (bytes == 0 || bytes % 16 != 0) fail("%s (line %d): %u bytes, must be a multiple of 16", what, line, bytes);
  check_global(source, bytes, 16, what, line);
  shared_bytes(target, bytes, 16, what, line);
  const int index = mbarrier_at(mbarrier, what, line);
  if (!m.mbarriers[index].visible) fail("%s (line %d): no fence made the transaction barrier visible to copies", what, line);
  note_write(target, bytes, m.current->fenced, what, line);
  begin_copy(target, bytes);
  m.free_copies.push_back({{target, static_cast<const uint8_t*>(source), bytes, bytes, line}, index, -1});
}

bool land_some_copy() {
  if (m.free_copies.empty()) return false;
  const size_t which = random_u32() % m.free_copies.size();
  const FreeCopy landed = m.free_copies[which];
  m.free_copies[which] = m.free_copies.back();
  m.free_copies.pop_back();
  const bool is_bulk = landed.arrival < 0;
  const uint32_t bytes = landed.copy.taken;
  uint8_t* to = dynamic_smem + (landed.copy.target - kSharedBase);
  std::memset(to, 0, bytes);
  std::memcpy(to, landed.copy.source, landed.copy.bytes);
  note_landed(landed.copy.target, bytes, kMaxThreads + landed.mbarrier);
  if (is_bulk) {
    Mbarrier& b = m.mbarriers[landed.mbarrier];
    b.clock.of[kMaxThreads + landed.mbarrier] = ++m.now;
    b.bytes -= bytes;
    complete_if_due(b);
  } else if (--m.arrivals[landed.arrival] == 0) {
    arrive_for_copies(landed.mbarrier);
  }
  return true;
}

}  // namespace host
