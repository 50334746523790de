// Lanes as fibers, their schedule, warp collectives and block barriers, and the launch.
#include "state.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <utility>

#if defined(_FORTIFY_SOURCE) && _FORTIFY_SOURCE > 0
#error "fibers jump between stacks, which a fortified longjmp refuses: compile with -U_FORTIFY_SOURCE"
#endif

extern "C" {
alignas(1024) unsigned char dynamic_smem[kSharedBytesMax];
}

namespace host {

Machine m;

namespace {

constexpr size_t kPage = 4096, kStackBytes = 128 * 1024;
constexpr unsigned long long kCollectivesMax = 1'000'000;  // some seconds
enum HomeReason { kBlockDone = 1, kFailed = 2 };

}  // namespace

void fail(const char* format, ...) {
  int used = 0;
  if (m.current != nullptr)
    used = std::snprintf(m.message, sizeof m.message, "block %u thread %d (warp %d lane %d): ", m.block, m.current->index,
                         m.current->index / kWarp, m.current->index % kWarp);
  va_list list;
  va_start(list, format);
  std::vsnprintf(m.message + used, sizeof m.message - used, format, list);
  va_end(list);
  _longjmp(m.home, kFailed);
}

uint32_t random_u32() {
  m.random ^= m.random << 13, m.random ^= m.random >> 7, m.random ^= m.random << 17;
  return static_cast<uint32_t>(m.random >> 16);
}

void note(const char* what, int line) {
  m.current->last = what;
  if (line != 0) m.current->line = line;
}

// ---- schedule -------------------------------------------------------------------------------------------------------

namespace {

[[noreturn]] void report_deadlock() {
  char text[1500];
  int used = 0;
  for (size_t w = 0; w < m.warps.size(); ++w)
    for (int lane = 0; lane < kWarp;) {
      const Lane& first = m.lanes[w * kWarp + lane];
      int end = lane + 1;
      for (; end < kWarp; ++end) {
        const Lane& other = m.lanes[w * kWarp + end];
        if (other.done != first.done || (!first.done && (other.waits != first.waits || other.line != first.line))) break;
      }
      if (used < 1300) {
        used += std::snprintf(text + used, sizeof text - used, "\n  warp %zu lanes %d-%d ", w, lane, end - 1);
        used += first.done ? std::snprintf(text + used, sizeof text - used, "have returned")
                           : std::snprintf(text + used, sizeof text - used, "wait in %s (line %d)", first.waits, first.line);
      }
      lane = end;
    }
  m.current = nullptr;
  fail("block %u: deadlock, no thread can run:%s", m.block, text);
}

// Copies land at any time: now and then while lanes run, and at the latest when all of them wait.
int pick_warp(int preferred) {
  if (random_u32() % 64 == 0) land_some_copy();
  if (preferred >= 0 && m.warps[preferred].ready != 0 && random_u32() % 4 != 0) return preferred;
  do {
    const int count = static_cast<int>(m.warps.size()), first = static_cast<int>(random_u32() % count);
    for (int i = 0; i < count; ++i)
      if (m.warps[(first + i) % count].ready != 0) return (first + i) % count;
  } while (land_some_copy());
  report_deadlock();
}

Lane& pick_lane(int preferred_warp) {
  const int w = pick_warp(preferred_warp);
  return m.lanes[w * kWarp + m.warps[w].order[__builtin_ctz(m.warps[w].ready)]];
}

[[noreturn]] void jump_to(Lane& next) {
  m.current = &next;
  if (next.started) _longjmp(next.at, 1);
  next.started = true;
  setcontext(&next.start);
  __builtin_unreachable();
}

[[gnu::noinline]] void switch_to(Lane& next) {
  Lane* self = m.current;
  if (&next == self) return;
  if (_setjmp(self->at) == 0) jump_to(next);
}

void lane_main() {
  m.launch->enter(m.launch->params);
  Lane& self = *m.current;
  for (const auto& group : self.groups)
    if (!group.empty()) fail("returns with an asynchronous copy of line %d in flight", group.front().line);
  if (!self.open.empty()) fail("returns with an asynchronous copy of line %d in flight and not committed", self.open.front().line);
  self.done = true;
  set_ready(self, false);
  if (--m.live == 0) {
    for (size_t w = 0; w < m.warps.size(); ++w)
      if (m.warps[w].registers != m.warps[w / 4 * 4].registers)
        fail("warps %zu and %zu of a warpgroup have %u and %u registers", w / 4 * 4, w, m.warps[w / 4 * 4].registers,
             m.warps[w].registers);
    if (!m.free_copies.empty()) fail("the block ends with a copy of line %d in flight", m.free_copies.front().copy.line);
    _longjmp(m.home, kBlockDone);
  }
  jump_to(pick_lane(self.index / kWarp));
}

}  // namespace

void set_ready(const Lane& lane, bool ready) {
  Warp& warp = m.warps[lane.index / kWarp];
  for (int position = 0; position < kWarp; ++position)
    if (warp.order[position] == lane.index % kWarp)
      warp.ready = ready ? warp.ready | 1u << position : warp.ready & ~(1u << position);
}

void block_current(const char* what, int line) {
  m.current->waits = what;
  m.current->line = line;
  set_ready(*m.current, false);
  switch_to(pick_lane(m.current->index / kWarp));
}

// ---- where lanes meet -----------------------------------------------------------------------------------------------

Exchange& exchange() { return m.current->exchange; }
int thread_index() { return m.current->index; }
int block_threads() { return static_cast<int>(m.launch->threads); }
uint32_t block_index() { return m.block; }
uint32_t grid_blocks() { return m.launch->grid; }

void collective(Op op, int line) {
  Lane& self = *m.current;
  Warp& warp = m.warps[self.index / kWarp];
  note(name_of(op), line);
  if (warp.arrived == 0) {
    warp.op = op, warp.line = line, warp.first_lane = self.index % kWarp;
  } else if (warp.op != op || warp.line != line) {
    fail("%s (line %d): the warp diverges, its lane %d is in %s (line %d)", name_of(op), line, warp.first_lane,
         name_of(warp.op), warp.line);
  }
  if (++warp.arrived < kWarp) return block_current(name_of(op), line);
  warp.arrived = 0;
  if (++m.launch->collectives > kCollectivesMax) fail("%s (line %d): the launch does not end", name_of(op), line);
  execute(op, &m.lanes[self.index / kWarp * kWarp], line);
  m.current = &self;
  warp.ready = 0xffffffffu;
  switch_to(pick_lane(self.index / kWarp));
}

bool barrier(int id, int threads, bool reduces, bool flag, int line) {
  const char* name = reduces ? "barrier_any" : "barrier_sync";
  note(name, line);
  if (id < 0 || id >= kBarriers) fail("%s (line %d): barrier %d, there are 0 to 15", name, line, id);
  if (threads % kWarp != 0 || threads <= 0 || threads > static_cast<int>(m.lanes.size()))
    fail("%s (line %d): %d threads, must be a multiple of 32 up to the block's %zu", name, line, threads, m.lanes.size());
  Barrier& b = m.barriers[id];
  if (b.waiting.empty()) b.threads = threads, b.reduces = reduces, b.flag = false, b.line = line;
  if (b.reduces != reduces) fail("%s (line %d): others are at barrier %d of the other kind (line %d)", name, line, id, b.line);
  if (b.threads != threads)
    fail("%s (line %d): %d threads, others (line %d) expect %d at barrier %d", name, line, threads, b.line, b.threads, id);
  b.flag |= flag;
  b.waiting.push_back(m.current);
  if (static_cast<int>(b.waiting.size()) < threads) {
    block_current(name, line);
  } else {
    join_warps(b.waiting, name, line);
    ++m.launch->barriers;
    for (Lane* lane : b.waiting) {
      lane->any = b.flag;
      set_ready(*lane, true);
    }
    b.waiting.clear();
    switch_to(pick_lane(-1));
  }
  return m.current->any;
}

void move_registers(uint32_t count, bool raises, int line) {
  const Op op = raises ? Op::kRegistersRaise : Op::kRegistersLower;
  Warp& warp = m.warps[m.current->index / kWarp];
  const uint32_t before = warp.registers;
  if (m.warps.size() % 4 != 0) fail("%s (line %d): %zu warps are no whole warpgroups", name_of(op), line, m.warps.size());
  if (raises ? count < before : count > before)
    fail("%s (line %d): %u registers, the warp has %u", name_of(op), line, count, before);
  exchange().in[0] = count;
  collective(op, line);
  while (warp.registers != count) {  // the first lane moves them for the warp
    if (!raises || m.spare_registers >= count - warp.registers) {
      m.spare_registers += warp.registers - count;
      warp.registers = count;
      for (Lane* lane : m.want_registers) set_ready(*lane, true);
      m.want_registers.clear();
    } else {
      m.want_registers.push_back(m.current);
      block_current(name_of(op), line);
    }
  }
}

void dependency_wait() {
  note("grid_dependency_wait", 0);
  if (m.dependency_met) return;
  m.dependency_met = true;
  protect_predecessors(false);
}

// ---- launch ---------------------------------------------------------------------------------------------------------

namespace {

// Illegal plain accesses end in a guard page; checks that the compiler put into the body end in a trap.
void on_signal(int signal, siginfo_t* info, void*) {
  if (!m.running || m.current == nullptr) {
    std::signal(signal, SIG_DFL);
    return;
  }
  const char* last = m.current->last ? m.current->last : "the kernel's start";
  const int line = m.current->line;
  if (signal != SIGSEGV && signal != SIGBUS)
    fail("undefined behaviour (array bounds, alignment, overflow or shift) after %s (line %d)", last, line);
  const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
  for (unsigned i = 0; i < m.launch->region_count; ++i) {
    const HostRegion& r = m.launch->regions[i];
    if (address + 2 * kPage < r.begin || address >= r.end + kPage) continue;
    const char* why = r.predecessors && !m.dependency_met          ? " before the dependency wait"
                      : address >= r.begin && address < r.end ? ": it is read-only"
                                                              : "";
    fail("plain access of address %#lx, byte %lld of %s (%llu B), is illegal%s; after %s (line %d)", address,
         static_cast<long long>(address - r.begin), r.name, r.end - r.begin, why, last, line);
  }
  fail("plain access of address %#lx, which is in no tensor, after %s (line %d)", address, last, line);
}

void start_lane(int index) {
  Lane& lane = m.lanes[index];
  lane.index = index;
  lane.started = lane.done = false;
  lane.last = lane.waits = nullptr;
  lane.line = 0;
  lane.open.clear();
  lane.groups.clear();
  getcontext(&lane.start);
  lane.start.uc_stack.ss_sp = m.stacks[index] + kPage;
  lane.start.uc_stack.ss_size = kStackBytes;
  lane.start.uc_link = nullptr;
  makecontext(&lane.start, lane_main, 0);
}

void start_block() {
  std::memset(dynamic_smem, 0xff, m.launch->smem_bytes);
  m.live = static_cast<int>(m.launch->threads);
  m.elected = static_cast<int>(random_u32() % kWarp);
  m.dependency_met = false;
  for (Barrier& barrier : m.barriers) barrier.waiting.clear();
  m.mbarriers.clear();
  m.free_copies.clear();
  m.arrivals.clear();
  m.spare_registers = 0;
  m.want_registers.clear();
  protect_predecessors(true);
  for (Warp& warp : m.warps) {
    warp.ready = 0xffffffffu;
    warp.arrived = 0;
    warp.registers = m.launch->registers;
    for (int i = 0; i < kWarp; ++i) warp.order[i] = static_cast<uint8_t>(i);
    for (int i = kWarp - 1; i > 0; --i) std::swap(warp.order[i], warp.order[random_u32() % (i + 1)]);
  }
  for (int i = 0; i < m.live; ++i) start_lane(i);
  reset_order();
}

bool prepare(HostLaunch* launch) {
  m.launch = launch;
  m.random = launch->seed * 0x9e3779b97f4a7c15ull + 0x1234567ull;
  m.lanes.resize(launch->threads);
  m.warps.resize(launch->threads / kWarp);
  while (m.stacks.size() < launch->threads) {  // each above a page that may not be touched
    void* stack = mmap(nullptr, kPage + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, kPage, PROT_NONE) != 0) return false;
    m.stacks.push_back(static_cast<uint8_t*>(stack));
  }
  for (unsigned i = 0; i < launch->smem_bytes / 4; ++i) m.writes[i] = {0, 0, -1};
  for (size_t w = 0; w < m.warps.size(); ++w) {
    std::memset(m.reads[w], 0, launch->smem_bytes / 4 * sizeof(Reads));
    std::memset(m.adds[w], 0, launch->smem_bytes / 4 * sizeof(Reads));
  }
  std::memset(m.last_add, 0, launch->smem_bytes);
  m.now = 1;
  launch->barriers = launch->collectives = 0;
  return true;
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};

}  // namespace
}  // namespace host

// Runs the grid block after block, in an order that depends on the seed. Returns null, or what went wrong.
extern "C" const char* host_run(HostLaunch* launch) {
  using namespace host;
  if (launch->threads % kWarp != 0 || launch->threads == 0 || launch->threads > kMaxThreads)
    return "threads: must be a multiple of 32 up to 1024";
  if (launch->smem_bytes > kSharedBytesMax) return "shared memory: more than a block can have";
  if (!prepare(launch)) return "no memory for the threads' stacks";
  std::vector<uint32_t> blocks(launch->grid);
  for (uint32_t i = 0; i < launch->grid; ++i) blocks[i] = i;
  for (uint32_t i = launch->grid; i > 1; --i) std::swap(blocks[i - 1], blocks[random_u32() % i]);

  static uint8_t* signal_stack = new uint8_t[65536];
  stack_t own_stack{}, old_stack{};
  own_stack.ss_sp = signal_stack, own_stack.ss_size = 65536;
  sigaltstack(&own_stack, &old_stack);
  struct sigaction own{}, old[4];
  own.sa_sigaction = on_signal;
  own.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &own, &old[i]);

  volatile bool failed = false;
  for (volatile uint32_t i = 0; i < launch->grid && !failed; i = i + 1) {
    m.block = blocks[i];
    start_block();
    m.running = true;
    const int reason = _setjmp(m.home);
    if (reason == 0) jump_to(pick_lane(-1));
    m.running = false;
    m.current = nullptr;
    protect_predecessors(false);
    failed = reason == kFailed;
  }
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  return failed ? m.message : nullptr;
}
