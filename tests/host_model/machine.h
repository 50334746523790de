// A CUDA thread block on one CPU thread: lanes are fibers that meet in warp collectives and barriers. The models of
// templates/prims/ptx call this; it checks every access that they make and stops the launch with a message.
#pragma once
#include <cstdint>

namespace host {

using std::int32_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// Operands and results of the running lane's next warp collective.
struct Exchange {
  uint32_t in[6];
  float accumulator[4];
  uint32_t out[4];
};

enum class Op {
  kShuffle,
  kShuffleXor,
  kBallot,
  kSum,
  kElectOne,
  kWarpSync,
  kRegistersRaise,
  kRegistersLower,
  kLoadMatrixX4,
  kLoadMatrixX4Trans,
  kLoadMatrixX2Trans,
  kMmaF16,
  kMmaBf16
};

Exchange& exchange();
// All 32 lanes of the warp arrive with the same op and line, then it happens.
void collective(Op op, int line);

int thread_index();
int block_threads();
uint32_t block_index();
uint32_t grid_blocks();

// `threads` threads meet at a barrier; returns the disjunction of their flags. All of them either reduce or do not.
bool barrier(int id, int threads, bool reduces, bool flag, int line);

// Shared addresses are offsets into dynamic shared memory plus a base that is not zero.
uint32_t shared_address(const void* pointer, int line);
void load_shared(uint32_t address, void* target, uint32_t bytes, const char* what, int line);
void store_shared(uint32_t address, const void* source, uint32_t bytes, const char* what, int line);
// Adds to a word, or sets bits of it, and returns what was there. Such updates of a word need no order among each other; to
// plain accesses of it they do.
uint32_t shared_update(uint32_t address, uint32_t value, bool adds, const char* what, int line);
void load_global(const void* address, void* target, uint32_t bytes, const char* what, int line);
void store_global(void* address, const void* source, uint32_t bytes, const char* what, int line);

// The target holds 0xff bytes from the issue to the wait that covers the copy.
void copy_async(uint32_t target, const void* source, uint32_t bytes, int line);
void copy_async_8(uint32_t target, const void* source, uint32_t bytes, int line);
void copy_async_4(uint32_t target, const void* source, uint32_t bytes, int line);
void copy_async_commit();
void copy_async_wait(int pending, int line);

// The target holds 0xff bytes until the copy lands, some time later; who waited for the barrier may then read it.
void copy_bulk(uint32_t target, const void* source, uint32_t bytes, uint32_t mbarrier, int line);
void mbarrier_init(uint32_t address, uint32_t count, int line);
void fence_mbarrier_init(int line);
void mbarrier_arrive_expect(uint32_t address, uint32_t bytes, int line);
void mbarrier_arrive(uint32_t address, int line);
// One arrival when all 16-byte copies that the thread has started have landed, some time later.
void mbarrier_arrive_after_copies(uint32_t address, int line);
void mbarrier_wait(uint32_t address, uint32_t parity, int line);
void fence_proxy_async(int line);

// The warp has `count` registers a lane afterwards. It may have to wait until others have given theirs back. Warps of a
// warpgroup must end with the same count.
void move_registers(uint32_t count, bool raises, int line);

// Until the first thread of a block comes here, memory that the launch marked as the predecessor's cannot be touched.
void dependency_wait();

// A member of the shared-memory struct that plain C++ accesses: each access is checked as a shared load or store.
template <class T>
struct SharedCell {
  T value;
  operator T() const {
    T out;
    load_shared(shared_address(&value, 0), &out, sizeof(T), "read of a SharedStorage member", 0);
    return out;
  }
  T operator=(T x) {
    store_shared(shared_address(&value, 0), &x, sizeof(T), "write of a SharedStorage member", 0);
    return x;
  }
  T operator=(const SharedCell& other) { return *this = static_cast<T>(other); }
  T operator+=(T x) { return *this = *this + x; }
  T operator*=(T x) { return *this = *this * x; }
  T operator|=(T x) { return *this = *this | x; }
};

}  // namespace host
