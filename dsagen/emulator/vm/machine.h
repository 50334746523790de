// The machine: a grid of CTAs, each a set of warps of 32 lanes that run one bytecode program.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace vm {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kLanes = 32;
constexpr u32 kFullMask = 0xffffffffu;
// Addresses. Shared ones are 32 bits wide and start past a reserve, so that none is 0; the others are windows of the
// generic space that no registered buffer may touch.
constexpr u32 kSharedReserve = 1024;
// Above an address in a CTA's shared memory stands the CTA's rank in its cluster: it is one of the cluster's space too.
constexpr u32 kRankShift = 24, kMostRanks = 16;
constexpr u64 kSharedWindow = 0x7100'0000'0000ull;
constexpr u64 kLocalWindow = 0x7200'0000'0000ull;
constexpr u64 kParamWindow = 0x7300'0000'0000ull;
constexpr u64 kWindowBytes = 1ull << 32;

enum Space : u32 { kGeneric, kGlobal, kShared, kLocal, kParam, kConst, kCluster, kSpaces };

// One instruction. `args` is where its operands start in the operand list: slots, or predicates (bit 15: negated).
// `guard` is 0, or the predicate's number + 1, negative where the guard is negated.
struct Ins {
  u16 op;
  i16 guard;
  u32 args;
  i32 imm;
  u32 flags;
};

struct Region {
  u64 begin, end;
  u8* host;
  u32 writable;
  u32 after_wait;  // only accessible past griddepcontrol.wait
  u8* valid;  // whether each byte has been written; null: all have
  const char* name;
};

// Special registers are constants of a warp; `kind` is a row of kSpecialNames in launch.cpp.
struct Preload {
  u32 slot, kind, value;
};

// What Python passes; the same fields in the same order there.
struct Launch {
  const Ins* code;
  const u16* args;
  const u32* ptx_lines;
  const u32* cuda_lines;
  const Preload* preloads;
  const char* const* unknown;  // texts of instructions that the machine lacks
  const Region* regions;
  const u8* params;
  u32 instructions, slots, predicates, preload_count, region_count, param_bytes;
  u32 local_bytes, shared_bytes, dynamic_shared_bytes;
  u32 grid[3], block[3], cluster[3];
  u32 os_threads, races;
  u32 schedule, resident;  // Schedule; CTAs that take turns on an OS thread
  u64 seed;
  u64 instruction_limit;
  u64 counters[4];  // out: warp instructions, completed barriers, matrix products, bytes copied asynchronously
  char message[4096];
  struct MeterTotals* meter;  // of counters.h; null where nothing is measured
};

enum Schedule : u32 { kInTurn, kRandom, kByPriority };
enum Counter { kInstructions, kBarriers, kMatrixProducts, kCopiedBytes };

// Thrown by an instruction; the machine adds the place.
struct Fault {
  std::string text;
};

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string print(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Random {
  u64 state;
  u32 next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<u32>(state >> 33);
  }
  u32 below(u32 n) { return next() % n; }
};

struct Cta;
class Meter;

}  // namespace vm

#include "order.h"
#include "warpgroup.h"
#include "cluster.h"

namespace vm {

// Lanes that stand at a barrier of the CTA, or at the one of the cluster (kClusterBarrier).
struct Stand {
  u32 mask, pc;
  int barrier;
  u16 result;  // predicate or slot of barrier.red
};
constexpr int kClusterBarrier = 16;

struct Warp {
  Cta* cta = nullptr;
  u32 index = 0;
  u32* slots = nullptr;
  u32* predicates = nullptr;
  u32 pc[kLanes] = {};
  u32 born = 0;       // lanes that have a thread
  u32 live = 0;       // not exited
  u32 runnable = 0;   // live and not parked, nor at a barrier
  u32 parked = 0;     // at a warp-wide instruction, other lanes are to come
  u32 yielded = 0;    // runnable, but others go first
  u32 polling = 0;    // last did a failed mbarrier wait of `poll_address`, or a strong access
  u32 poll_pc = 0, poll_parity = 0;
  u64 poll_address = 0;
  bool polls_memory = false;
  u64 fingerprints[8] = {};  // of its registers after its last turns, while nothing else happened
  u32 fingerprint = 0;       // the next to be replaced
  u32 registers = 0;    // per thread, as setmaxnreg has it; 0 before
  u32 grid_waited = 0;  // lanes past griddepcontrol.wait
  u32 store = 0;        // number of the store that runs
  ProductGroups groups;  // of wgmma
  u32 cluster_arrived = 0, cluster_passed = 0;  // at the cluster's barrier: in this phase, and in one that has ended
  std::vector<Stand> stands;
  std::vector<u8> local;

  // The group that runs now. An instruction may change `next`, or set `stop` once it has set the pc of all lanes.
  u32 group = 0, now = 0, next = 0;
  bool stop = false;

  u32* row(u16 slot) { return slots + slot * kLanes; }
  u32 predicate(u16 p) const { return p & 0x8000 ? ~predicates[p & 0x7fff] : predicates[p]; }
  void set_predicate(u16 p, u32 mask, u32 bits) { predicates[p] = (predicates[p] & ~mask) | (bits & mask); }
  void set_pc(u32 mask, u32 to) {
    for (int l = 0; l < kLanes; l++)
      if (mask >> l & 1) pc[l] = to;
  }
  int thread(int lane) const { return static_cast<int>(index) * kLanes + lane; }
};

// A copy of at most 16 bytes that has not landed, or an arrival that waits for a thread's copies.
struct Pending {
  enum Kind : u32 { kCopy, kArrive } kind;
  u32 thread, group;  // commit group of the thread
  u32 destination, bytes, copied;  // the rest up to `bytes` is zeros
  u64 source;
  u32 barrier;
  u32 pc;
  u32 lane_bit;
  u32 number = 0;  // among the thread's copies; for an arrival, how many it waits for
};

// Of an mbarrier: what arrivals of the running phase release, what those of the last phase have, and the same of other
// CTAs, which only waits of cluster scope acquire; and who has made its initialisation visible to the asynchronous
// proxy. Bytes that come from other CTAs' shared memory have an agent of their own.
struct MbarrierClocks {
  Knowledge arriving, completed, far_arriving, far_completed;
  u32 agent = 0, far_agent = 0, phases = kInitialised;
  u32 initialiser = 0;  // thread
  Access fenced{};
};

struct NamedBarrier {
  Knowledge clock;
  u32 arrived = 0, expected = 0;  // expected 0: all threads that have not exited
  u32 mode = 0;                   // what those who wait do, see barrier.cpp
  bool any = false, all = true;
  u32 count = 0;  // true predicates
};

struct Cta {
  const Launch* launch = nullptr;
  u32 id[3] = {};
  u32 linear = 0;
  Cluster* cluster = nullptr;
  u32 rank = 0, shared_base = kSharedReserve;  // in the cluster; the address of the first byte of shared memory
  std::vector<u8> shared, shared_valid;
  std::vector<u32> storage;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::vector<u32> priorities;  // of warps, for schedules that have them
  NamedBarrier barriers[16];
  std::unordered_map<u32, MbarrierClocks> mbarriers;  // by address
  Order order;
  GlobalOrder* global = nullptr;
  std::vector<Pending> pending;
  std::vector<BulkWork> bulk;
  std::vector<u32> bulk_groups;  // per thread: groups of bulk copies committed so far
  std::vector<u32> commit_groups;  // per thread: groups committed so far
  std::vector<std::vector<u32>> copies_committed;  // per thread: copies up to each commit
  const Region* last_region = nullptr;
  Random random{};
  u64 progress = 0;  // changes whenever something happens that others may wait for
  u64 counters[4] = {};
  u64 executed = 0;
  u32 fault_lane = 0;
  const std::vector<Region>* regions = nullptr;
  std::shared_ptr<Meter> meter;  // where the launch is measured

  Cta(const Launch& launch, const std::vector<Region>& regions, GlobalOrder& global);
  void start(Cluster& cluster, u32 rank);
  bool finished() const;
  // One turn of each warp; whether anything came of it. `strict`: registers that change count, accesses do not.
  bool turn(bool strict);
  // So many instructions of one warp, at most; false where it can do nothing at present.
  bool run_slice(Warp& warp, u32 budget);
  // Who waits where.
  std::string describe_waiting() const;

 private:
  bool run_in_turn(bool strict);
  bool run_by_priority(bool strict);
  bool run_warp(Warp& warp, u32 budget);
  void run_group(Warp& warp, u32 limit, u32& budget);
  void load_specials(Warp& warp);
};

using Handler = void (*)(Warp&, const Ins&, u32 mask);
// Adds an instruction to the machine under the name that the Python rules use.
struct Register {
  Register(const char* name, Handler handler);
};
const std::vector<std::pair<const char*, Handler>>& handlers();

// ---- memory (memory.cpp) ----
// Host bytes behind an address, after all checks; `lane` is for the message.
// `strong` (AccessFlag): accesses that do not race with each other. `ordered`: that much has been checked.
u8* access(Warp& w, Space space, u64 address, u32 bytes, bool write, int lane, u32 strong = 0, bool ordered = false);
// What a generic or global address is called in messages.
std::string name_address(const Cta& cta, u64 address);
// The word of an atomic operation, after all checks; what it orders; and, after all lanes' are done, whether any changed
// its word.
u8* atomic_access(Warp& w, const Ins& i, u64 address, u32 bytes, int lane);
void order_atomic(Warp& w, const Ins& i, u64 address, int lane);
void end_atomic(Warp& w, u32 mask, u64 address, bool changes);
u8* shared_bytes(Cta& cta, u32 address, u32 bytes, const char* what);
const u8* global_source(Cta& cta, u64 address, u32 bytes, bool waited);
u8* global_bytes(Cta& cta, u64 address, u32 bytes, bool write, bool waited, const Region** in = nullptr);
// Whether all bytes have been written, a byte for each.
bool all_valid(const u8* valid, u32 bytes);
u64 address_of(Warp& w, const Ins& i, u16 operand, int lane);

// ---- asynchronous copies and mbarriers (async.cpp) ----
bool complete_some(Cta& cta, bool all);
void complete_pending(Cta& cta, size_t index);

// Adds to an element in memory as these flags of `atom` say.
void reduce(u8* at, const u8* by, u32 flags);

// ---- mbarriers (mbarrier.cpp) ----
// The bytes of an mbarrier of `owner`, of whose initialisation the lane has to know.
u8* mbarrier_bytes(Warp& w, int lane, Cta& owner, u32 address, const char* what);
// That the asynchronous proxy is to see the mbarrier's initialisation.
void require_visible(Warp& w, int lane, Cta& owner, u32 address);
// Arrivals and announced bytes; the token of before.
u64 arrive(Cta& owner, u32 address, i32 count, i32 bytes, const char* what);
void expect_one_more(Cta& owner, u32 address);
std::string describe_mbarrier(const Cta& cta, u32 address);
// Bytes that an mbarrier of the CTA still waits for when it ends.
void require_no_bytes_awaited(const Cta& cta);

// ---- clusters (cluster.cpp) ----
// The CTA of the cluster in whose shared memory an address lies, which has not ended.
Cta& owner_of(Cta& cta, u32 address, const char* what);
// The same where an instruction reaches its own CTA only.
void require_own(const Cta& cta, u32 address, const char* what);
u8* remote_access(Warp& w, u32 address, u32 bytes, bool write, int lane, u32 strong);
void recheck_cluster_barrier(Cluster& cluster);
std::string describe_cluster_barrier(const Cluster& cluster);
// After a lane's exit.
void leave_cta(Warp& w, u32 mask);

// ---- the asynchronous proxy (bulk.cpp) ----
bool complete_bulk(Cta& cta, bool all);
// What may not be under way any more when a CTA ends; what may lands.
void end_bulk(Cta& cta);

// ---- wgmma (wgmma.cpp) ----
// A warp that ends must have waited for its products.
void require_no_products(const Warp& w);
// Whether it waits there for others of its warpgroup.
bool at_product(const Warp& w);

// ---- barriers (barrier.cpp) ----
void recheck_barriers(Cta& cta);

// A description of an instruction's place in the sources.
std::string place(const Cta& cta, u32 pc);

// After a strong access, which may be one of many that wait for another thread's: others run first.
void poll(Warp& w, u32 mask, u64 address);

// Takes lanes out of the running group for good, or until others have run.
void yield_lanes(Warp& w, u32 mask);

// True once all lanes of `need` stand at this instruction; `mask` then holds them, else they were parked.
bool gather(Warp& w, u32& mask, u32 need);

template <class F>
inline __attribute__((always_inline)) void each_lane(u32 mask, F f) {
  if (mask == kFullMask) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; l++) f(l);
  } else {
    for (u32 m = mask; m != 0; m &= m - 1) f(__builtin_ctz(m));
  }
}

template <class T, class F>
inline T bits_as(F from) {
  static_assert(sizeof(T) == sizeof(F));
  T to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Lane `l` of the register that starts at `row`; 64-bit ones take two rows, low half first.
template <class T>
inline T get(const u32* row, int l) {
  if constexpr (sizeof(T) == 8)
    return bits_as<T>(static_cast<u64>(row[l]) | static_cast<u64>(row[l + kLanes]) << 32);
  else if constexpr (sizeof(T) == 4)
    return bits_as<T>(row[l]);
  else if constexpr (sizeof(T) == 2)
    return bits_as<T>(static_cast<u16>(row[l]));
  else
    return bits_as<T>(static_cast<u8>(row[l]));
}

// Narrow values are stored with the other bits zero.
template <class T>
inline void put(u32* row, int l, T value) {
  if constexpr (sizeof(T) == 8) {
    const u64 bits = bits_as<u64>(value);
    row[l] = static_cast<u32>(bits);
    row[l + kLanes] = static_cast<u32>(bits >> 32);
  } else if constexpr (sizeof(T) == 4) {
    row[l] = bits_as<u32>(value);
  } else if constexpr (sizeof(T) == 2) {
    row[l] = bits_as<u16>(value);
  } else {
    row[l] = bits_as<u8>(value);
  }
}

// Operand of an instruction with several addresses: slot, offset's low half, its high half.
inline u32 narrow_address(Warp& w, const u16* x, int lane) {
  return w.row(x[0])[lane] + (x[1] | static_cast<u32>(x[2]) << 16);
}
inline u64 wide_address(Warp& w, const u16* x, int lane) {
  return get<u64>(w.row(x[0]), lane) + static_cast<i64>(static_cast<i32>(x[1] | static_cast<u32>(x[2]) << 16));
}

#define VM_OPERANDS const u16* x = w.cta->launch->args + i.args
// d = EXPR of a (and b, c), lane by lane. The operands are the first ones of the list.
#define VM_UNARY(NAME, D, A, ...)                                        \
  static void op_##NAME(Warp& w, const Ins& i, u32 mask) {               \
    VM_OPERANDS;                                                         \
    u32* d = w.row(x[0]);                                                \
    const u32* ra = w.row(x[1]);                                         \
    each_lane(mask, [=](int l) {                                         \
      const A a = get<A>(ra, l);                                         \
      put<D>(d, l, static_cast<D>(__VA_ARGS__));                                \
    });                                                                  \
  }                                                                      \
  static const Register register_##NAME(#NAME, op_##NAME);
#define VM_BINARY(NAME, D, A, B, ...)                                    \
  static void op_##NAME(Warp& w, const Ins& i, u32 mask) {               \
    VM_OPERANDS;                                                         \
    u32* d = w.row(x[0]);                                                \
    const u32 *ra = w.row(x[1]), *rb = w.row(x[2]);                      \
    each_lane(mask, [=](int l) {                                         \
      const A a = get<A>(ra, l);                                         \
      const B b = get<B>(rb, l);                                         \
      put<D>(d, l, static_cast<D>(__VA_ARGS__));                                \
    });                                                                  \
  }                                                                      \
  static const Register register_##NAME(#NAME, op_##NAME);
#define VM_TERNARY(NAME, D, A, B, C, ...)                                \
  static void op_##NAME(Warp& w, const Ins& i, u32 mask) {               \
    VM_OPERANDS;                                                         \
    u32* d = w.row(x[0]);                                                \
    const u32 *ra = w.row(x[1]), *rb = w.row(x[2]), *rc = w.row(x[3]);   \
    each_lane(mask, [=](int l) {                                         \
      const A a = get<A>(ra, l);                                         \
      const B b = get<B>(rb, l);                                         \
      const C c = get<C>(rc, l);                                         \
      put<D>(d, l, static_cast<D>(__VA_ARGS__));                                \
    });                                                                  \
  }                                                                      \
  static const Register register_##NAME(#NAME, op_##NAME);

}  // namespace vm
