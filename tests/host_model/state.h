// What the machine's parts share: the lanes of the running block and what is known about its shared memory.
#pragma once
#include "machine.h"

#include <csetjmp>
#include <ucontext.h>
#include <vector>

constexpr unsigned kSharedBytesMax = 232448;

extern "C" {
extern unsigned char dynamic_smem[kSharedBytesMax];  // the block's dynamic shared memory; kernels declare it themselves

struct HostRegion {
  unsigned long long begin, end;
  int predecessors;  // written by the grid before: not to be touched until the dependency wait
  char name[36];
};

struct HostLaunch {
  void (*enter)(const void* params);  // calls the kernel; stands after the rendered unit
  const void* params;
  const HostRegion* regions;
  unsigned region_count, grid, threads, smem_bytes;
  unsigned registers;  // of a thread at the start
  unsigned long long seed;
  unsigned long long barriers, collectives;  // results
};
}

namespace host {

constexpr int kWarp = 32, kMaxWarps = 32, kMaxThreads = kWarp * kMaxWarps;
constexpr int kBarriers = 16, kMbarriersMax = 64;
constexpr uint32_t kSharedBase = 1024;

// Order of accesses. `Machine::now` counts releases. An access is stamped with `now`; a release by a thread raises `now` and
// sets the thread's own entry to it. Clock[t] is the newest release of thread t that the owner of the clock has acquired,
// so an access of t at stamp s happened before what the owner does next exactly if s < clock[t]. Entries from kMaxThreads
// on belong to the copies that land on a transaction barrier.
struct Clock {
  uint32_t of[kMaxThreads + kMbarriersMax];
};

struct Copy {
  uint32_t target;
  const uint8_t* source;
  uint32_t bytes;
  uint32_t taken;  // bytes of the target: what is not copied there is zeros
  int line;
};

struct Lane {
  ucontext_t start;
  jmp_buf at;
  bool started, done;
  int index;
  const char* last;  // last modelled call
  int line;          // and its line in the rendered unit
  const char* waits;
  bool any;  // result of the last barrier
  Exchange exchange;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
  Clock clock, fenced;  // now, and at the last proxy fence
};

struct Warp {
  uint32_t ready;  // by position in `order`
  uint8_t order[kWarp];
  int arrived;
  Op op;
  int line, first_lane;
  uint32_t registers;  // of a lane
  // Newest release that all lanes of a warp made and all lanes of this one have acquired: what is older needs no look at
  // single lanes.
  uint32_t joint[kMaxWarps];
  uint32_t joint_copies[kMbarriersMax];  // as much for copies that land on a transaction barrier
};

// What is known about 4 bytes of shared memory: the last write, and by warp the last reads. Stamps up to
// `Machine::before` have not happened in this block.
struct Write {
  uint32_t stamp;
  int16_t writer;
  int16_t copier;  // thread whose copy is in flight here, or -1
};

struct Reads {
  uint32_t stamp;  // the newest
  uint32_t lanes;
  int32_t each;    // index of Machine::each_lane where lanes read at different stamps, else -1
};

struct LaneStamps {
  uint32_t of[kWarp];
};

struct Barrier {
  int threads;
  bool reduces, flag;
  int line;
  std::vector<Lane*> waiting;
};

struct Mbarrier {
  uint32_t address, count, phase;
  int pending;
  long long bytes;  // announced and not landed
  int owner;        // thread that initialised it
  bool visible;     // to the asynchronous proxy
  Clock clock, completed;
  std::vector<Lane*> waiting;
};

// A copy that lands by itself and then counts on a transaction barrier: a bulk copy by its bytes, 16-byte copies of a thread
// together by one arrival.
struct FreeCopy {
  Copy copy;
  int mbarrier;
  int arrival;  // index of Machine::arrivals, -1 for a bulk copy
};

struct Machine {
  HostLaunch* launch;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::vector<uint8_t*> stacks;
  Write writes[kSharedBytesMax / 4];
  Reads reads[kMaxWarps][kSharedBytesMax / 4];
  Reads adds[kMaxWarps][kSharedBytesMax / 4];  // atomic additions since the last plain write
  uint32_t last_add[kSharedBytesMax / 4];      // the newest of them
  std::vector<LaneStamps> each_lane;
  Lane* current;
  Barrier barriers[kBarriers];
  std::vector<Mbarrier> mbarriers;
  std::vector<FreeCopy> free_copies;
  std::vector<int> arrivals;  // copies that an arrival still waits for
  uint32_t spare_registers;   // given back by warps, in registers a lane
  std::vector<Lane*> want_registers;
  int live, elected;
  uint32_t block, now, before;
  bool dependency_met;
  uint64_t random;
  jmp_buf home;
  bool running;
  char message[2048];
};

extern Machine m;

[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);
uint32_t random_u32();
void note(const char* what, int line);

// fibers.cpp
void block_current(const char* what, int line);
void set_ready(const Lane& lane, bool ready);

// order.cpp
uint8_t* shared_bytes(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what, int line);
void note_read(uint32_t address, uint32_t bytes, int warp, uint32_t lanes, const char* what, int line);
void note_write(uint32_t address, uint32_t bytes, const Clock& clock, const char* what, int line);
void note_landed(uint32_t address, uint32_t bytes, int writer);
void begin_copy(uint32_t address, uint32_t bytes);
void join_warps(const std::vector<Lane*>& lanes, const char* what, int line);  // a barrier of whole warps
void release(Lane& lane, Clock& to);
void acquire(Lane& lane, const Clock& from);
void note_joint_copies(const Lane& lane, int mbarrier);
void reset_order();

// copies.cpp
void check_global(const void* pointer, uint32_t bytes, uint32_t alignment, const char* what, int line);
void protect_predecessors(bool closed);
bool land_some_copy();

// warp_ops.cpp
const char* name_of(Op op);
void execute(Op op, Lane* lanes, int line);

}  // namespace host
